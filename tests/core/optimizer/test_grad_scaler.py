"""Loss scales against Megatron-LM's rules, written out with numbers."""

import random

import pytest
import torch

from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, build_grad_scaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig

CPU = torch.device("cpu")


class MegatronLm:
    """Overflow: growth = 0, hysteresis -= 1, and at 0 or below the scale is halved, not under its minimum. Clean:
    growth += 1; at the interval growth = 0, hysteresis is full again, the scale doubles."""

    def __init__(self, scale: float, minimum: float, interval: int, hysteresis: int) -> None:
        self.scale, self.minimum, self.interval, self.full = scale, minimum, interval, hysteresis
        self.growth, self.hysteresis = 0, hysteresis

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.growth = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
            return
        self.growth += 1
        if self.growth == self.interval:
            self.growth, self.hysteresis = 0, self.full
            self.scale *= 2.0


@pytest.mark.parametrize("seed", range(4))
def test_the_dynamic_scale_follows_the_rules(seed: int) -> None:
    source = random.Random(seed)
    megatron_lm = MegatronLm(2.0**6, 1.0, 5, 2)
    ours = DynamicGradScaler(2.0**6, 1.0, 5, 2, CPU)
    for _ in range(300):
        overflowed = source.random() < 0.2
        megatron_lm.update(overflowed)
        ours.update(torch.tensor(overflowed), torch.tensor(True))
        assert ours.state_dict() == {
            "scale": megatron_lm.scale,
            "growth_tracker": megatron_lm.growth,
            "hysteresis_tracker": megatron_lm.hysteresis,
        }


def test_a_step_that_does_not_count_leaves_no_trace() -> None:
    scaler = DynamicGradScaler(64.0, 1.0, 1, 1, CPU)
    before = scaler.state_dict()
    for overflowed in (True, False):
        scaler.update(torch.tensor(overflowed), torch.tensor(False))
    assert scaler.state_dict() == before


def test_state_comes_back() -> None:
    scaler = DynamicGradScaler(64.0, 1.0, 10, 2, CPU)
    for overflowed in (True, True, False, False):
        scaler.update(torch.tensor(overflowed), torch.tensor(True))
    again = DynamicGradScaler(2.0, 1.0, 10, 2, CPU)
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict() == {"scale": 32.0, "growth_tracker": 2, "hysteresis_tracker": 0}


def test_which_scale_a_config_asks_for() -> None:
    dynamic = build_grad_scaler(OptimizerConfig(fp16=True), CPU)
    assert isinstance(dynamic, DynamicGradScaler)
    assert (dynamic.scale, dynamic.min_scale, dynamic.growth_interval, dynamic.hysteresis) == (2.0**32, 1.0, 1000, 2)
    constant = build_grad_scaler(OptimizerConfig(fp16=True, loss_scale=512.0), CPU)
    assert isinstance(constant, ConstantGradScaler)
    constant.update(torch.tensor(True), torch.tensor(True))
    assert constant.scale == 512.0
    assert build_grad_scaler(OptimizerConfig(bf16=True), CPU) is None
