"""A run and its config."""

import dataclasses
import time

import pytest
from support.runs import GPT, TINY

from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.pretraining import run_pretraining


def config_of(flags: str) -> PretrainConfig:
    words = f"{TINY} --mock-data --train-iters 9 {flags}".split()
    return configure(words, launch_environment=LaunchEnvironment(1, False))


def values_of(config: PretrainConfig) -> dict[str, str]:
    """Every value of every part, also those that are no fields (functions that a script may set)."""
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    parts["transformer"] = config.transformer
    values = {name: vars(part) if hasattr(part, "__dict__") else {"": part} for name, part in parts.items()}
    return {f"{part}.{name}": repr(value) for part, of_part in values.items() for name, value in of_part.items()}


@pytest.mark.parametrize(
    "flags",
    [
        "--fp16 --initial-loss-scale 1024 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--bf16 --num-experts 2 --moe-router-topk 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --eval-interval 2 --eval-iters 1 --num-layers 2 --mtp-num-layers 1",
    ],
)
def test_a_run_writes_nothing_into_its_config(flags: str) -> None:
    config = config_of(f"{flags} --train-iters 2 --lr-decay-iters 9")
    before = values_of(config)
    assert len(before) > 400 and any(name.startswith("transformer.") for name in before)
    run_pretraining(config, GPT, time.monotonic())
    assert values_of(config) == before
