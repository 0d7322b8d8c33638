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
from megatron.core.optimizer.clip_grads import clip_divisor, grad_norm
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepUpdate, true_on_all_ranks
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection


class ExternalOptimizer(MegatronOptimizer):
    """Lets a script's own optimizer take part in the loop: gradients are clipped and copied into `.grad` for its step.

    Every step waits for the device, to learn whether the gradient is finite, and costs a second copy of the gradients;
    there are no main weights, so that a bfloat16 model is updated in bfloat16. Where that matters, use
    `get_megatron_optimizer`. The schedule of the flags drives the learning rate; weight decay stays as the script set
    it. float16 needs a loss scale and is refused.
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
            raise UserError(
                f"--fp16 with the script's own {name}, which knows no loss scale: use --bf16, or --optimizer"
            )
        wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
        if len(wrapped) != len(chunks):
            raise UserError(f"the model of the script's own {name} is not wrapped in DistributedDataParallel")
        self.config = config
        self.optimizer = optimizer
        self.groups = pg_collection or wrapped[0].pg_collection
        self.units = [unit for chunk in wrapped for unit in chunk.units]
        if any(unit.sharding.shards > 1 for unit in self.units):
            raise UserError(
                f"the script's own {name} updates whole weights, and data parallel ranks share them out "
                f"({sharding_strategy_of(wrapped[0].ddp_config).value}): leave out --use-distributed-optimizer and "
                "full sharding, or use --optimizer"
            )
        self.device = self.units[0].device
        self._places = {slot.parameter: (unit, slot) for unit in self.units for slot in unit.slots}
        strangers = sum(parameter not in self._places for parameter in self.get_parameters())
        if strangers:
            raise UserError(f"{name} holds {strangers} tensors that the model does not train; use model.parameters()")
        for group in self.param_groups:
            own = group.get("weight_decay", 0.0)
            group.setdefault("start_wd", own)
            group.setdefault("end_wd", own)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The optimizer's own."""
        return self.optimizer.state

    @torch.no_grad()
    def step_on_device(self, loss_is_finite: Tensor | None = None) -> StepUpdate:
        """As any optimizer's, but waits for the device."""
        norm = grad_norm(self.units, self.groups)
        applied = norm.isfinite()
        if loss_is_finite is not None:
            applied &= true_on_all_ranks(loss_is_finite, self.groups)
        if applied.item():
            divisor = clip_divisor(norm, self.config.clip_grad)
            for parameter, (unit, slot) in self._places.items():
                parameter.grad = (slot.view_in(unit.grad_buffer) / divisor).to(parameter.dtype)
            self.optimizer.step()
            self.zero_grad()
        return StepUpdate(norm, applied)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._places:
            parameter.grad = None

    def get_loss_scale(self) -> Tensor:
        return torch.ones((), dtype=torch.float32, device=self.device)

    def get_parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """It works on the model's weights themselves."""

    # State: tensors shaped as their parameter are chunks, numbers are common -----------------------------------------

    def state_chunks(self) -> Iterator[Chunk]:
        self._begin_state()
        for parameter, (_, slot) in self._places.items():
            for kind, value in self.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
                    flat = value.view(-1)[: slot.info.box.numel]
                    yield optimizer_state_chunk(kind, slot.info, flat, holders=replica_ranks(slot.info, self.groups))

    def common_state(self) -> dict[str, Any]:
        """Of all parameters of the model: ranks that hold different ones tell each other."""
        self._begin_state()
        own = {
            slot.info.name: {
                kind: value.item() if isinstance(value, Tensor) else value
                for kind, value in self.state.get(parameter, {}).items()
                if _is_number(value)
            }
            for parameter, (_, slot) in self._places.items()
        }
        if self.groups.size("mp") == 1:
            return own
        known: dict[str, Any] = {}
        group = self.groups.mp
        assert isinstance(group, ProcessGroup)
        for of_rank in RankCoordinator(group).gather(own):
            known |= of_rank
        return known

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        self._begin_state()
        for parameter, (_, slot) in self._places.items():
            for kind, value in state[slot.info.name].items():
                held = self.state[parameter][kind]
                if isinstance(held, Tensor):
                    held.fill_(value)
                else:
                    self.state[parameter][kind] = value

    @torch.no_grad()
    def _begin_state(self) -> None:
        """Make the state tensors of an optimizer that never stepped, so that a checkpoint can be loaded into them.

        There is no other way to have them made than a step: with zero gradients and rate, after which weights and
        counts are put back.
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0)
