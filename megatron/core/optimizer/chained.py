"""ChainedOptimizer: several optimizers, each of some of the model's parameters, that step as one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.exceptions import UserError
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepUpdate
from megatron.core.optimizer.qk_clip import QKClip


class ChainedOptimizer(MegatronOptimizer):
    """Steps several optimizers together. Gradients are clipped by the norm of all gradients, and either all optimizers
    update their weights or none does.

    `get_megatron_optimizer` never returns one: its FlatOptimizer handles all parameters. Raises UserError for other
    optimizers than those of `get_megatron_optimizer`.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        flat = [optimizer for optimizer in chained_optimizers if isinstance(optimizer, FlatOptimizer)]
        if not flat or len(flat) < len(chained_optimizers):
            names = ", ".join(type(optimizer).__name__ for optimizer in chained_optimizers) or "none"
            raise UserError(f"ChainedOptimizer chains what get_megatron_optimizer returns; it was given {names}")
        if len(flat) > 1:
            QKClip.refuse(flat[0].chunks, "ChainedOptimizer")
        self.chained_optimizers = flat
        self.config = flat[0].config
        self.param_groups = [group for optimizer in flat for group in optimizer.param_groups]

    @torch.no_grad()
    def step_on_device(self, loss_is_finite: Tensor | None = None) -> StepUpdate:
        """Clips by the norm of all gradients and updates all weights, unless one gradient is not finite."""
        norm = torch.stack([optimizer.unscaled_norm() for optimizer in self.chained_optimizers]).square().sum().sqrt()
        updates = [optimizer.update(norm, loss_is_finite) for optimizer in self.chained_optimizers]
        zeros = [update.num_zeros for update in updates if update.num_zeros is not None]
        applied = torch.stack([update.update_applied for update in updates]).all()
        logit = updates[0].max_attention_logit
        return StepUpdate(norm, applied, torch.stack(zeros).sum() if zeros else None, logit)

    def update_only_if(self, allowed: Tensor) -> None:
        """Passes the scalar to each optimizer."""
        for optimizer in self.chained_optimizers:
            optimizer.update_only_if(allowed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets `.grad` of all parameters to None."""
        for optimizer in self.chained_optimizers:
            optimizer.zero_grad(set_to_none)

    def get_loss_scale(self) -> Tensor:
        """Returns the loss scale of the first optimizer, which all share."""
        return self.chained_optimizers[0].get_loss_scale()

    def get_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of all optimizers."""
        return [parameter for optimizer in self.chained_optimizers for parameter in optimizer.get_parameters()]

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Continues from the model's weights, after they were changed from outside."""
        for optimizer in self.chained_optimizers:
            optimizer.reload_model_params(state_dict)

    def after_load(self) -> None:
        """Calls `after_load` of each optimizer."""
        for optimizer in self.chained_optimizers:
            optimizer.after_load()

    def state_chunks(self) -> Iterator[Chunk]:
        """Yields the chunks of all optimizers."""
        for optimizer in self.chained_optimizers:
            yield from optimizer.state_chunks()

    def common_state(self) -> dict[str, object]:
        """Returns the common state of each optimizer, in a list."""
        return {"chained": [optimizer.common_state() for optimizer in self.chained_optimizers]}

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Loads what `common_state` returned."""
        for optimizer, its_state in zip(self.chained_optimizers, state["chained"], strict=True):
            optimizer.load_common_state(its_state)
