"""ExternalOptimizer: a plain torch.optim.Optimizer over the parameters of wrapped model chunks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.dist_checkpointing.chunk import Chunk, optimizer_state_chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.sharding_strategy import replica_ranks, sharding_strategy_of
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer.clip_grads import clip_divisor, grad_norm
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepUpdate, true_on_all_ranks
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.qk_clip import QKClip


class ExternalOptimizer(MegatronOptimizer):
    """Lets the training loop use a script's own optimizer: gradients are clipped and copied into `.grad` for its step.

    Every step waits for the device to learn whether the gradient is finite, and needs a second copy of the gradients.
    There are no main weights, so a bfloat16 model is updated in bfloat16; `get_megatron_optimizer` keeps main weights.
    The schedule of the flags sets the learning rate; the script sets the weight decay.

    Raises UserError for float16, which needs a loss scale; for sharded weights; and for parameters that the model does
    not train.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        optimizer: torch.optim.Optimizer,
        chunks: Sequence[nn.Module],
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        name = type(optimizer).__name__
        if config.fp16:
            raise UserError(f"--fp16 with the script's own {name}, which has no loss scale: use --bf16, or --optimizer")
        wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
        if len(wrapped) != len(chunks):
            raise UserError(f"the model of the script's own {name} is not wrapped in DistributedDataParallel")
        QKClip.refuse(wrapped, f"the script's own {name}")
        self.config = config
        self.optimizer = optimizer
        self.groups = pg_collection or wrapped[0].pg_collection
        self.units = [unit for chunk in wrapped for unit in chunk.units]
        if any(unit.sharding.shards > 1 for unit in self.units):
            raise UserError(
                f"the script's own {name} updates whole weights, but data parallel ranks shard them "
                f"({sharding_strategy_of(wrapped[0].ddp_config).value}): leave out --use-distributed-optimizer and "
                "full sharding, or use --optimizer"
            )
        if any(unit.frees_parameters for unit in self.units):
            raise UserError(
                f"the script's own {name} updates weights that --fp8-param-gather keeps only in fp8: leave the flag "
                "out, or use --optimizer"
            )
        self.device = self.units[0].device
        self._allowed = torch.ones((), dtype=torch.bool, device=self.device)
        self._slots = {slot.parameter: (unit, slot) for unit in self.units for slot in unit.slots}
        unknown = sum(parameter not in self._slots for parameter in self.get_parameters())
        if unknown:
            raise UserError(f"{name} has {unknown} tensors that the model does not train; use model.parameters()")
        for group in self.param_groups:
            own = group.get("weight_decay", 0.0)
            group.setdefault("start_wd", own)
            group.setdefault("end_wd", own)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the script's optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of the script's optimizer."""
        return self.optimizer.state

    @torch.no_grad()
    def step_on_device(self, loss_is_finite: Tensor | None = None) -> StepUpdate:
        """Clips and updates; see `MegatronOptimizer.step_on_device`. Waits for the device."""
        norm = grad_norm(self.units, self.groups)
        applied = norm.isfinite() & self._allowed
        if loss_is_finite is not None:
            applied &= true_on_all_ranks(loss_is_finite, self.groups)
        if applied.item():
            divisor = clip_divisor(norm, self.config.clip_grad)
            for parameter, (unit, slot) in self._slots.items():
                parameter.grad = (slot.view_in(unit.grad_buffer) / divisor).to(parameter.dtype)
            self.optimizer.step()
            self.zero_grad()
        return StepUpdate(norm, applied)

    def update_only_if(self, allowed: Tensor) -> None:
        """Takes the scalar that every later step reads; see `MegatronOptimizer.update_only_if`."""
        self._allowed = allowed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets `.grad` of all parameters to None."""
        for parameter in self._slots:
            parameter.grad = None

    def get_loss_scale(self) -> Tensor:
        """Returns 1: there is no loss scale."""
        return torch.ones((), dtype=torch.float32, device=self.device)

    def get_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Does nothing: the optimizer updates the model's weights themselves."""

    # State: tensors shaped as their parameter are chunks, numbers are common state
    # -----------------------------------------

    def state_chunks(self) -> Iterator[Chunk]:
        """Yields the state tensors that have the shape of their parameter."""
        self._begin_state()
        for parameter, (_, slot) in self._slots.items():
            for kind, value in self.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
                    flat = value.view(-1)[: slot.info.box.numel]
                    yield optimizer_state_chunk(kind, slot.info, flat, holders=replica_ranks(slot.info, self.groups))

    def common_state(self) -> dict[str, Any]:
        """Returns the numbers in the state of all parameters of the model, gathered over model parallel ranks."""
        self._begin_state()
        own = {
            slot.info.name: {
                kind: value.item() if isinstance(value, Tensor) else value
                for kind, value in self.state.get(parameter, {}).items()
                if _is_number(value)
            }
            for parameter, (_, slot) in self._slots.items()
        }
        if self.groups.size("mp") == 1:
            return own
        known: dict[str, Any] = {}
        group = self.groups.mp
        assert isinstance(group, ProcessGroup)
        for numbers in RankCoordinator(group).gather(own):
            known |= numbers
        return known

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Loads what `common_state` returned."""
        self._begin_state()
        for parameter, (_, slot) in self._slots.items():
            for kind, value in state[slot.info.name].items():
                own = self.state[parameter][kind]
                if isinstance(own, Tensor):
                    own.fill_(value)
                else:
                    self.state[parameter][kind] = value

    @torch.no_grad()
    def _begin_state(self) -> None:
        """Creates the state tensors of an optimizer that has not stepped, so that a checkpoint can be loaded into them.

        Only a step creates them: this one has zero gradients and a learning rate of 0; afterwards weights and step
        counts are restored.
        """
        if self.state:
            return
        weights = [unit.param_buffer.clone() for unit in self.units]
        rates = [group["lr"] for group in self.param_groups]
        for parameter in self.get_parameters():
            parameter.grad = torch.zeros_like(parameter)
        for group in self.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.zero_grad()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for unit, weight in zip(self.units, weights, strict=True):
            unit.param_buffer.copy_(weight)
        for values in self.state.values():
            for kind, value in values.items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif _is_number(value):
                    values[kind] = type(value)(0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0)
