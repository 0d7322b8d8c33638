"""MegatronOptimizer: the interface between a training loop and any optimizer."""

import abc
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from megatron.core.communication.collectives import all_reduce
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer.optimizer_config import OptimizerConfig

if TYPE_CHECKING:
    from megatron.core.optimizer.weight_average import WeightAverage


@dataclass(frozen=True)
class StepUpdate:
    """The result of a step: scalar tensors on the device. Reading them waits for the device."""

    grad_norm: Tensor
    """2-norm of the whole model's gradient before clipping, without the loss scale; not finite if any gradient is
    not."""
    update_applied: Tensor
    """bool: whether weights were updated. False if gradient or loss was not finite, if an earlier step stopped the run,
    or if `update_only_if` says so."""
    num_zeros: Tensor | None = None
    """Number of gradient elements that are exactly zero; only with log_num_zeros_in_grad."""
    max_attention_logit: Tensor | None = None
    """The largest attention logit of the step; only with log_max_attention_logit or qk_clip in the model's config."""


class MegatronOptimizer(abc.ABC):
    """The interface of an optimizer for a training loop.

    `step_on_device` never waits for the device; `step`, Megatron-LM's call, does. `param_groups` are
    dictionaries with `lr`, `weight_decay` and the settings that a scheduler reads.
    """

    config: OptimizerConfig
    param_groups: list[dict[str, Any]]
    average: "WeightAverage | None" = None
    """The moving average of the weights; None without --ema-decay."""

    @abc.abstractmethod
    def step_on_device(self, loss_is_finite: Tensor | None = None) -> StepUpdate:
        """Clips the finalised gradients and updates the weights, unless a gradient is not finite.

        `loss_is_finite` is this rank's bool scalar; False on any rank prevents the update on all.
        """

    def step(self) -> tuple[bool, float | None, int | None]:
        """Does one step with Megatron-LM's result: (True, gradient norm, number of zeros in the gradient or None), or
        (False, None, None) if the update was not applied. Waits for the device."""
        result = self.step_on_device()
        if not result.update_applied.item():
            return False, None, None
        zeros = None if result.num_zeros is None else int(result.num_zeros.item())
        return True, result.grad_norm.item(), zeros

    def update_only_if(self, allowed: Tensor) -> None:
        """Makes later steps update the weights only if `allowed`, a bool scalar on the device, is True. `allowed` must
        be equal on all ranks and keep its address. Raises UserError for a script's own optimizer."""
        raise UserError(
            f"--loss-spike-action: {type(self).__name__} is the script's own, and cannot skip an "
            "update; leave out the flag, or use --optimizer"
        )

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets `.grad` of all parameters to None. `zero_grad_buffer` of the wrapped model zeroes main gradients."""

    @abc.abstractmethod
    def get_loss_scale(self) -> Tensor:
        """Returns the factor of the loss: a scalar tensor on the device."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the scaled loss, from which backward starts."""
        return loss * self.get_loss_scale()  # at least float32: a scale can be beyond float16

    @abc.abstractmethod
    def get_parameters(self) -> list[nn.Parameter]:
        """Returns all parameters that are updated."""

    @abc.abstractmethod
    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Continues from the model's weights, after they were changed from outside."""

    @abc.abstractmethod
    def state_chunks(self) -> Iterator[Chunk]:
        """Yields the tensors of the state as checkpoint chunks that share their memory."""

    @abc.abstractmethod
    def common_state(self) -> dict[str, object]:
        """Returns the rest of the state, equal on every rank, as JSON types. Waits for the device."""

    @abc.abstractmethod
    def load_common_state(self, state: Mapping[str, object]) -> None:
        """Loads what `common_state` returned."""

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the whole state of this rank."""
        tensors = {name: chunk.values().clone().view_as(chunk.tensor) for name, chunk in self._named_chunks().items()}
        return {"common": self.common_state(), "state": tensors}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned in the same layout. Raises UserError for a missing or unknown tensor."""
        chunks = self._named_chunks()
        odd = sorted(chunks.keys() ^ state_dict["state"].keys())
        if odd:
            raise UserError(f"optimizer state does not fit this model: {odd[0]} and {len(odd) - 1} more differ")
        for name, chunk in chunks.items():
            chunk.load(state_dict["state"][name])
        self.load_common_state(state_dict["common"])
        self.after_load()

    def after_load(self) -> None:  # noqa: B027  (most optimizers need nothing)
        """All ranks call this together after they have loaded weights and state into `state_chunks`."""

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any] | None = None,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the state dict for `dist_checkpointing.save` and `load`: its tensors share the optimizer's memory
        (those that are stored in narrow types are copies), and each has its position in the whole tensor.

        The result of a load fits `load_state_dict` under any layout. The arguments have no effect.
        """
        tensors = {name: ShardedTensor.from_chunk(chunk) for name, chunk in self._named_chunks().items()}
        return {"common": self.common_state(), "state": tensors}

    def _named_chunks(self) -> dict[str, Chunk]:
        """Returns the chunks by name. Further chunks of one tensor on this rank, such as another box of it, get a
        number."""
        found: dict[str, Chunk] = {}
        counts: Counter[str] = Counter()
        for chunk in self.state_chunks():
            counts[chunk.name] += 1
            number = counts[chunk.name]
            found[chunk.name if number == 1 else f"{chunk.name} ({number})"] = chunk
        return found


def true_on_all_ranks(flag: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Returns whether a bool scalar is True on every rank of the model and its replicas, as a tensor on the device."""
    common = flag.to(torch.int32, copy=True)
    for name in ("dp_cp", "mp"):
        if groups.size(name) > 1:
            all_reduce(common, getattr(groups, name), ReduceOp.MIN)
    return common.bool()
