"""Impossible values of the optimizer's settings are named."""

from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.optimizer.optimizer_config import OptimizerConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adam_beta1": 1.0}, "adam_beta1 1.0 must be at least 0 and less than 1"),
        ({"adam_beta2": -0.1}, "adam_beta2 -0.1 must be at least 0 and less than 1"),
        ({"sgd_momentum": 1.5}, "sgd_momentum 1.5 must be at least 0 and less than 1"),
        ({"lr": -1.0}, "lr -1.0 must be at least 0"),
        ({"lr": float("nan")}, "lr nan must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay -0.1 must be at least 0"),
        ({"lr": 0.1, "min_lr": 0.2}, "min_lr 0.2 is larger than lr 0.1"),
        ({"adam_eps": 0.0}, "adam_eps 0.0 must be larger than 0"),
        ({"clip_grad": -1.0}, "clip_grad -1.0 must be at least 0; 0 turns clipping off"),
        ({"loss_scale": 0.0}, "loss_scale 0.0 must be larger than 0"),
        ({"hysteresis": 0}, "hysteresis 0 must be larger than 0"),
        ({"optimizer": "muon", "muon_num_ns_steps": 0}, "muon_num_ns_steps 0 must be larger than 0"),
        ({"lion_beta1": -0.1}, "lion_beta1 -0.1 must be at least 0 and less than 1"),
        (
            {"use_precision_aware_optimizer": True, "optimizer": "sgd"},
            "use_precision_aware_optimizer needs optimizer adam",
        ),
        (
            {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
            "main_params_dtype float16: a model in float32 has no main weights",
        ),
        ({"optimizer_cpu_offload": True, "optimizer": "muon"}, "whose momentum stays on the device; the state of adam"),
        ({"optimizer_offload_fraction": 1.5}, "optimizer_offload_fraction 1.5 must be from 0 to 1"),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        OptimizerConfig(**fields)
    assert message in str(caught.value)


def test_limits_are_taken() -> None:
    made = OptimizerConfig(lr=0.0, min_lr=0.0, clip_grad=0.0, adam_beta1=0.0, weight_decay=0.0, loss_scale=None)
    assert made.main_params_dtype is torch.float32 and made.decoupled_weight_decay
