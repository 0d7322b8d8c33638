"""Loss scales: factors of the loss that keep float16 gradients from underflowing. Their state is on the device."""

from typing import Protocol

import torch
from torch import Tensor

from megatron.core.optimizer.optimizer_config import OptimizerConfig


class GradScaler(Protocol):
    """A loss scale and its reaction to overflows."""

    scale: Tensor
    """float32 scalar."""

    def update(self, overflowed: Tensor, counted: Tensor) -> None:
        """Updates the scale after a step in which some gradient `overflowed` or not. If `counted` is False, nothing
        changes. Both are bool scalars on the device."""

    def state_dict(self) -> dict[str, float | int]:
        """Returns the state as numbers. Waits for the device."""

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Loads what `state_dict` returned."""


class ConstantGradScaler:
    """The constant scale of --loss-scale."""

    def __init__(self, scale: float, device: torch.device) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def update(self, overflowed: Tensor, counted: Tensor) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float | int]:
        """Returns the scale. Waits for the device."""
        return {"scale": self.scale.item()}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Does nothing: the flag of this run takes precedence over the checkpoint."""


class DynamicGradScaler:
    """Halves the scale after `hysteresis` overflows, and doubles it after `growth_interval` steps without overflow.

    The count of overflows restarts when the scale grows, not after a step without overflow: once the hysteresis is used
    up, every further overflow halves the scale.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_interval: int,
        hysteresis: int,
        device: torch.device,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
    ) -> None:
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.scale = torch.tensor(initial_scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.hysteresis_tracker = torch.tensor(hysteresis, dtype=torch.int32, device=device)

    def update(self, overflowed: Tensor, counted: Tensor) -> None:
        """Adapts the scale to one step, on the device. `overflowed` and `counted` are bool scalars; a step that does
        not count changes nothing."""
        left = self.hysteresis_tracker - overflowed.int()
        backs_off = overflowed & (left <= 0)
        clean = torch.where(overflowed, 0, self.growth_tracker + 1)
        grows = ~overflowed & (clean == self.growth_interval)
        smaller = (self.scale * self.backoff_factor).clamp(min=self.min_scale)
        scale = torch.where(backs_off, smaller, torch.where(grows, self.scale * self.growth_factor, self.scale))
        for old, new in (
            (self.scale, scale),
            (self.growth_tracker, torch.where(grows, 0, clean)),
            (self.hysteresis_tracker, torch.where(grows, self.hysteresis, left)),
        ):
            old.copy_(torch.where(counted, new, old))

    def state_dict(self) -> dict[str, float | int]:
        """Returns the scale and both counts. Waits for the device."""
        return {
            "scale": self.scale.item(),
            "growth_tracker": self.growth_tracker.item(),
            "hysteresis_tracker": self.hysteresis_tracker.item(),
        }

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Loads what `state_dict` returned."""
        self.scale.fill_(state["scale"])
        self.growth_tracker.fill_(state["growth_tracker"])
        self.hysteresis_tracker.fill_(state["hysteresis_tracker"])


def build_grad_scaler(config: OptimizerConfig, device: torch.device) -> GradScaler | None:
    """Returns the scaler of a config: the constant `loss_scale`, else a dynamic scale for float16, else None."""
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale, device)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        config.initial_loss_scale,
        config.min_loss_scale,
        int(config.loss_scale_window),
        config.hysteresis,
        device,
    )
