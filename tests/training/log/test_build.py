"""The log that the flags ask for."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import TINY

from megatron.core.exceptions import UserError
from megatron.core.timers import Timers
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.log import build
from megatron.training.log.build import build_log
from megatron.training.log.display import PlainDisplay
from megatron.training.log.jsonl import JsonlLog
from megatron.training.log.trackers import TrackerLog
from megatron.training.log.training_log import TrainingLog
from megatron.training.state import TrainState


def log_of(flags: str, logs: bool = True) -> TrainingLog:
    words = f"{TINY} --mock-data --train-iters 8 --log-interval 4 {flags}".split()
    config = configure(words, launch_environment=LaunchEnvironment(1, False))
    groups = SimpleNamespace(size=lambda name: 1, rank=lambda name: 0)
    environment: Any = SimpleNamespace(
        groups=groups, device=torch.device("cpu"), rank=0, world_size=1, has_loss=True, logs=logs
    )
    return build_log(config, environment, TrainState(), 41, [], Timers(0, "max"))


def test_writers_are_files_first_and_the_console_last(tmp_path: Path) -> None:
    log = log_of(f"--metrics-path {tmp_path / 'metrics.jsonl'}")
    assert [type(writer) for writer in log.writers] == [JsonlLog, PlainDisplay]
    assert (log.train_iters, log.log_interval, log.tokens_per_sample) == (8, 4, 16)
    assert log.flops_per_sample is not None and log.flops_per_sample > 0
    log.close_writers()


def test_frozen_weights_count_four_operations() -> None:
    """The log of a run with adapters leaves the gradients of frozen weights out."""
    alone, adapted = (log_of(flags).flops_per_sample for flags in ("", "--lora-rank 1 --pretrained-checkpoint base"))
    assert alone is not None and adapted is not None and 4 / 6 < adapted / alone < 0.85


def test_length_of_the_queue_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(build, "tensorboard_log", lambda directory, choices, **others: asked.update(others))
    log_of(f"--tensorboard-dir {tmp_path} --tensorboard-queue-size 7")
    assert asked["queue_size"] == 7


def test_a_rank_that_does_not_log_has_no_writers(tmp_path: Path) -> None:
    assert log_of(f"--metrics-path {tmp_path / 'metrics.jsonl'}", logs=False).writers == ()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--metrics-path"):
        log_of(f"--metrics-path {tmp_path / 'file' / 'metrics.jsonl'}")


def test_overflows_are_expected_under_a_dynamic_loss_scale_only() -> None:
    assert log_of("--fp16").metrics.expect_overflow
    assert (
        not log_of("--fp16 --loss-scale 128").metrics.expect_overflow and not log_of("--bf16").metrics.expect_overflow
    )


def test_throughput_without_a_known_peak_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert log_of("--log-throughput").peak_tflops is None
    assert "--log-throughput: the peak rate of this device is not known" in capsys.readouterr().out


def test_what_a_cpu_cannot_show_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    log = log_of("--log-energy --log-device-memory-used --log-memory-interval 3")
    assert log.energy is None and log._memory_interval == 3 and log._device_memory_used
    said = capsys.readouterr().out
    assert "--log-energy: the log shows no energy" in said
    assert "--log-device-memory-used: the log shows the memory of the host only" in said
    log_of("--log-energy --log-device-memory-used", logs=False)
    assert capsys.readouterr().out == ""


def test_weights_and_biases_gets_what_its_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class FakeWandb:
        Error = RuntimeError

        @staticmethod
        def init(**arguments: Any) -> Any:
            asked.update(arguments)
            return SimpleNamespace(finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb)
    log_of("--wandb-project p --wandb-exp-name n --wandb-entity e --wandb-save-dir /tmp")
    assert {name: asked[name] for name in ("project", "name", "entity", "dir")} == {
        "project": "p",
        "name": "n",
        "entity": "e",
        "dir": "/tmp",
    }
    assert asked["config"]["num_layers"] == "2" and asked["config"]["lr"]
    with pytest.raises(UserError, match="--wandb-project p needs --wandb-exp-name: the name of the run"):
        log_of("--wandb-project p")


def test_log_to_names_services(tmp_path: Path) -> None:
    log = log_of(f"--log-to prometheus:{tmp_path / 'run.prom'} --tensorboard-log-interval 2")
    assert [type(writer) for writer in log.writers] == [TrackerLog, PlainDisplay]
    with pytest.raises(UserError, match="--log-to statsd: mlflow, comet, opentelemetry or prometheus:FILE"):
        log_of("--log-to mlflow statsd")
