"""Small runs, watched under a layout and in one process: equal as they are, and different where a bug is planted."""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from support.processes import run_on_ranks
from support.runs import GPT

from megatron.core import tokens as tokens_module
from megatron.core.models.common.embeddings import language_model_embedding
from megatron.core.models.gpt import gpt_model
from megatron.diagnosis.layout_check.differences import Difference, differences
from megatron.diagnosis.layout_check.layout_trace import (
    FORWARD,
    GRADIENT,
    INITIAL,
    NORM,
    WEIGHT,
    LayoutTrace,
    record_layout_trace,
)
from megatron.diagnosis.layout_check.shrink_run import flags_that_matter, shrink_run
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment

RUN = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 2 --global-batch-size 64"
)
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
CONTEXT = "--context-parallel-size 2"
PREDICTION = "--pipeline-model-parallel-size 2 --mtp-num-layers 1"
"""All on two ranks. In the last, the second stage embeds the tokens ahead."""


def watched(words: list[str], bug: str | None = None) -> LayoutTrace:
    """What this process sees, with a bug planted."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    with BUGS[bug]() if bug is not None else nullcontext():
        return record_layout_trace(configure(words, launch_environment=LaunchEnvironment(world, False)), GPT, 2)


def compared(flags: str, bug: str | None = None) -> list[Difference]:
    config = configure(flags_that_matter(f"{RUN} {flags}".split()), launch_environment=LaunchEnvironment(2, False))
    small = shrink_run(config, 2, 2)
    alone = watched(small.plain_words)
    assert {kind for kind, _ in alone.found} == {INITIAL, FORWARD, GRADIENT, NORM, WEIGHT}
    return differences(alone, run_on_ranks(watched, 2, small.words, bug), 1e-9)


@contextmanager
def norms_are_not_summed() -> Iterator[None]:
    """Under sequence parallelism every rank keeps its own tokens' part of a norm's gradient."""
    finalizing = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    inner = finalizing._sum_together

    def only_tied(gradients: Any, groups: Any, name: str) -> None:
        if name != "tp":
            inner(gradients, groups, name)

    with mock.patch.object(finalizing, "_sum_together", only_tied):
        yield


@contextmanager
def positions_run_on() -> Iterator[None]:
    """A context parallel rank counts its tokens from 0 instead of where its chunks stand."""
    right = tokens_module.position_ids

    def wrong(tokens: Any, device: Any = "cpu") -> torch.Tensor:
        return torch.arange(tokens.seq_length, device=device)[None] if tokens.part else right(tokens, device)

    def without_positions(*inputs: Any, **keywords: Any) -> Any:
        keywords["tokens"] = dataclasses.replace(keywords["tokens"], positions=None)
        return forward(inputs[0], inputs[1], None, *inputs[3:], **keywords)

    forward = gpt_model.GPTModel.forward
    with (
        mock.patch.object(language_model_embedding, "position_ids", wrong),
        mock.patch.object(gpt_model.GPTModel, "forward", without_positions),
    ):
        yield


BUGS: dict[str, Callable[[], Any]] = {"norms": norms_are_not_summed, "positions": positions_run_on}


@pytest.mark.fast("--tensor-model-parallel-size 2 --sequence-parallel")
@pytest.mark.parametrize("flags", [TENSOR, CONTEXT, PREDICTION])
def test_layouts_are_equal(flags):
    assert compared(flags) == []


def test_a_missing_sum_is_found_at_the_parameter():
    found = compared(TENSOR, "norms")
    first = found[0]
    assert (first.kind, first.name, first.ranks) == (GRADIENT, "decoder.final_layernorm.bias", (0, 1))
    assert first.error > 1e-3
    partial = {difference.name for difference in found if difference.kind == GRADIENT}
    assert all("layernorm" in name or name.endswith((".bias", "position_embeddings.weight")) for name in partial)


def test_wrong_positions_are_found_at_the_embedding_of_the_rank_that_has_them():
    first = compared(CONTEXT, "positions")[0]
    assert (first.kind, first.name) == (FORWARD, "embedding") and 1 in first.ranks
