"""MegatronOptimizer: what a training loop asks of an optimizer, whichever it is."""

import abc
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from megatron.core.collectives import all_reduce
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.exceptions import UserError
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class StepUpdate:
    """What became of a step: scalar tensors on the device, to be read when there is time."""

    grad_norm: Tensor
    """2-norm of the whole gradient before clipping, without the loss scale; not finite if any gradient is not."""
    update_applied: Tensor
    """bool: weights were updated. False: gradient or loss was not finite, or an earlier step stopped the run."""
    num_zeros: Tensor | None = None
    """Elements of the gradient that are exactly zero, with log_num_zeros_in_grad."""


class MegatronOptimizer(abc.ABC):
    """What a training loop asks of an optimizer.

    `step_on_device` never waits for the device; `step` is the published call, which does. `param_groups` are
    dictionaries with `lr`, `weight_decay` and the settings that a scheduler reads.
    """

    config: OptimizerConfig
    param_groups: list[dict[str, Any]]

    @abc.abstractmethod
    def step_on_device(self, loss_is_finite: Tensor | None = None) -> StepUpdate:
        """Clip and update from the finalised gradients, unless they are not finite.

        `loss_is_finite` is this rank's bool scalar; one rank's False stops the update on all.
        """

    def step(self) -> tuple[bool, float | None, int | None]:
        """Published form: (update applied, gradient norm, zeros in the gradient or None); (False, None, None) when the
        update was not applied. Waits for the device."""
        result = self.step_on_device()
        if not result.update_applied.item():
            return False, None, None
        zeros = None if result.num_zeros is None else int(result.num_zeros.item())
        return True, result.grad_norm.item(), zeros

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop `.grad` of all parameters. Main gradients are zeroed by `zero_grad_buffer` of the wrapped model."""

    @abc.abstractmethod
    def get_loss_scale(self) -> Tensor:
        """What the loss is to be multiplied by: a scalar tensor on the device."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to run backward from."""
        return loss * self.get_loss_scale()  # at least float32: a scale can be beyond float16

    @abc.abstractmethod
    def get_parameters(self) -> list[nn.Parameter]:
        """All parameters that are updated."""

    @abc.abstractmethod
    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Take the model's weights, which something else has set, as the weights to go on from."""

    @abc.abstractmethod
    def state_chunks(self) -> Iterator[Chunk]:
        """The tensors of the state, as checkpoint chunks over live memory."""

    @abc.abstractmethod
    def common_state(self) -> dict[str, Any]:
        """The rest of the state, the same on every rank, as JSON types. Waits for the device."""

    @abc.abstractmethod
    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Undo `common_state`."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of the whole state of this rank."""
        tensors = {name: chunk.tensor.clone() for name, chunk in self._named_chunks().items()}
        return {"common": self.common_state(), "state": tensors}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`, in the same layout. Raises UserError for a missing or unknown tensor."""
        chunks = self._named_chunks()
        odd = sorted(chunks.keys() ^ state_dict["state"].keys())
        if odd:
            raise UserError(f"optimizer state does not fit this model: {odd[0]} and {len(odd) - 1} more differ")
        for name, chunk in chunks.items():
            chunk.tensor.copy_(state_dict["state"][name].view_as(chunk.tensor))
        self.load_common_state(state_dict["common"])

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any] | None = None,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The state dict, over live memory and with each tensor's place, for `dist_checkpointing.save` and `load`.

        What a load gives back fits `load_state_dict` under any layout. The arguments change nothing: the state of each
        parameter knows its place.
        """
        tensors = {name: ShardedTensor.from_chunk(chunk) for name, chunk in self._named_chunks().items()}
        return {"common": self.common_state(), "state": tensors}

    def _named_chunks(self) -> dict[str, Chunk]:
        """The chunks by name; further parts of one tensor on this rank, such as another box of it, get a number."""
        found: dict[str, Chunk] = {}
        counts: Counter[str] = Counter()
        for chunk in self.state_chunks():
            counts[chunk.name] += 1
            number = counts[chunk.name]
            found[chunk.name if number == 1 else f"{chunk.name} ({number})"] = chunk
        return found


def true_on_all_ranks(flag: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Whether a bool scalar is True on every rank of the model and all its replicas; on the device."""
    common = flag.to(torch.int32, copy=True)
    for name in ("dp_cp", "mp"):
        if groups.size(name) > 1:
            all_reduce(common, getattr(groups, name), ReduceOp.MIN)
    return common.bool()
