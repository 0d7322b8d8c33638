"""The hooks that flags add to a run."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs import TINY

from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.hooks.gc import ManualGarbageCollection
from megatron.training.hooks.hardware import ReplicaCheck
from megatron.training.hooks.profiler import TorchProfiler
from megatron.training.hooks.progress_file import ProgressFile
from megatron.training.setup.hooks import build_hooks
from megatron.training.state import TrainState


def config_of(flags: str) -> PretrainConfig:
    words = f"{TINY} --mock-data {flags}".split()
    return configure(words, launch_environment=LaunchEnvironment(1, False))


def test_hooks_that_the_flags_ask_for(tmp_path: Any) -> None:
    here: Any = SimpleNamespace(rank=0)
    assert build_hooks(config_of("--train-iters 9"), here, TrainState()) == []
    profile = (
        f"--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4 --tensorboard-dir {tmp_path}"
    )
    config = config_of(f"--train-iters 9 --manual-gc --manual-gc-interval 5 {profile}")
    collection, profiler = build_hooks(config, here, TrainState())
    assert isinstance(collection, ManualGarbageCollection) and collection.interval == 5 and gc.isenabled()
    assert isinstance(profiler, TorchProfiler) and (profiler.start, profiler.end) == (2, 4)
    assert len(build_hooks(config, SimpleNamespace(rank=1), TrainState())) == 1  # --profile-ranks is 0  # type: ignore[arg-type]


def test_replicas_are_compared_if_a_flag_says_it() -> None:
    config, here = (
        config_of("--train-iters 9 --check-weight-hash-across-dp-replicas-interval 3"),
        SimpleNamespace(rank=0),
    )
    model: list[Any] = []
    (check,) = build_hooks(config, here, TrainState(), model)
    assert isinstance(check, ReplicaCheck) and check.interval == 3 and check.model is model


def test_hooks_that_write_files(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    here: Any = SimpleNamespace(rank=0, world_size=2, is_first=True)
    config = config_of(f"--train-iters 9 --log-progress --save {tmp_path} --record-memory-history")
    (progress,) = build_hooks(config, here, TrainState())
    assert isinstance(progress, ProgressFile) and progress.path == tmp_path / "progress.txt"
    assert "--record-memory-history: nothing is recorded" in capsys.readouterr().out
    other: Any = SimpleNamespace(rank=1, world_size=2, is_first=False)
    assert build_hooks(config, other, TrainState()) == []
