"""What set-up derives from the flags, without building a run."""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.runs import TINY, train

from megatron.core.exceptions import UserError
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.setup.set_up import set_torch


def config_of(flags: str, ranks: int = 1) -> PretrainConfig:
    words = f"{TINY} --eval-iters 1 --mock-data {flags}".split()
    return configure(words, launch_environment=LaunchEnvironment(ranks, False))


def test_global_options_of_torch_and_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # kept, since it is set already
    before = logging.getLogger().level
    try:
        flags = "--deterministic-mode --logging-level 35 --disable-bf16-reduced-precision-matmul"
        set_torch(config_of(f"--train-iters 9 {flags}"))
        assert torch.are_deterministic_algorithms_enabled() and logging.getLogger().level == 35
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        set_torch(config_of("--train-iters 9"))
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    finally:
        logging.getLogger().setLevel(before)


def test_a_full_disk_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has nothing left to train, or only evaluates, saves nothing, so it needs no room."""
    flags = f"--mock-data --train-iters 1 --eval-iters 0 --save {tmp_path}"
    warning = f"WARNING: --save {tmp_path}: a checkpoint takes "
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10_000_000, used=9_999_000))
    train(flags)  # the patched report is wrong
    assert warning in capsys.readouterr().out
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1000, used=0))
    with pytest.raises(UserError, match=r"--save .*: a checkpoint takes .* MB, and the whole file system there has"):
        train(flags)
    train(f"{flags} --load {tmp_path}")
    train(f"{flags} --eval-iters 1 --skip-train")
    assert warning not in capsys.readouterr().out
