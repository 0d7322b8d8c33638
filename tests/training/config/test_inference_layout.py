"""Layouts of tools that generate text: their ranks, their flags, and what is wrong with them."""

import pytest

from megatron.core.exceptions import UserError
from megatron.training.config.inference_layout import InferenceLayout
from megatron.training.config.tool_flags import Section, read_tool_flags


def read(*words: str) -> InferenceLayout:
    (layout,) = read_tool_flags(words, [Section("layout", InferenceLayout)], "usage", "about")
    return layout


def test_ranks_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read().num_ranks == 1 and read().words == []
    monkeypatch.setenv("WORLD_SIZE", "8")
    layout = read(
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
        *("--expert-model-parallel-size", "2"),
    )
    assert layout.num_ranks == 8 and "--expert-model-parallel-size 2" in " ".join(layout.words)
    assert layout.words[-2:] == ["--global-batch-size", "2"]


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--tensor-model-parallel-size 0 must be at least 1"):
        read("--tensor-model-parallel-size", "0")
    with pytest.raises(UserError, match="needs 2 ranks, and 1 are started; start it with torchrun --nproc_per_node 2"):
        read("--pipeline-model-parallel-size", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="needs 1 ranks, and 2 are started"):
        read()
