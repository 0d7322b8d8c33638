"""A run of the small model, with what a checkpoint keeps of it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.command_lines import configured
from support.small_models import SmallModel, batch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters import info_of
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.checkpoints import Checkpoints
from megatron.training.state import SavedParts, TrainState

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp64": {"dtype": torch.float64, "settings": {}},
    "fp32 sgd": {"dtype": torch.float32, "settings": {"optimizer": "sgd"}},
    "bf16 with masters": {"dtype": torch.bfloat16, "settings": {"bf16": True}},
    "fp16 with a loss scale": {
        "dtype": torch.float16,
        "settings": {"fp16": True, "initial_loss_scale": 2.0**20, "loss_scale_window": 2, "hysteresis": 1},
    },
}


@dataclass
class SmallRun:
    """A small model that trains, and its checkpoints."""

    model: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler
    state: TrainState
    checkpoints: Checkpoints

    @classmethod
    def make(cls, flags: str = "", dtype=torch.float64, settings=None, seed=5, **model) -> "SmallRun":
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        groups = ProcessGroupCollection.from_grid(RankGrid(world), rank)
        inner = SmallModel(dtype=dtype, seed=seed, padded=3, **model)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        ddp = DistributedDataParallel(inner.config, ddp_config, inner, pg_collection=groups)
        options = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0, **(settings or {})}
        optimizer = get_megatron_optimizer(OptimizerConfig(**options), [ddp])
        scheduler = OptimizerParamScheduler(optimizer, 0.0, 0.01, 0.001, 4, 40, "cosine", 0.1, 0.1, 40, "constant")
        config = configured(f"--lr-warmup-iters 1 {flags}", ranks=world)
        return cls(ddp, optimizer, scheduler, TrainState(), Checkpoints(config, groups))

    def train(self, steps: int) -> "SmallRun":
        for _ in range(steps):
            self.model.zero_grad_buffer()
            loss = self.model(*batch(self.state.consumed_train_samples, rows=4))
            self.optimizer.scale_loss(loss / 20).backward()
            self.model.finish_grad_sync()
            update = self.optimizer.step_on_device()
            self.scheduler.advance_on_device(update.update_applied, increment=4)
            self.state.iteration += 1
            self.state.consumed_train_samples += 4
            self.state.floating_point_operations_so_far += 1e12
        return self

    @property
    def parts(self) -> SavedParts:
        return SavedParts(self.state, [self.model], self.optimizer, self.scheduler)

    def save(self) -> None:
        self.checkpoints.save(self.parts)

    def load(self) -> bool:
        return self.checkpoints.load(self.parts)

    def everything(self) -> dict[str, Any]:
        """All state, by name, for comparison to the bit."""
        tensors = {info_of(p).name: p.detach().clone() for p in self.model.parameters()}
        tensors |= self.optimizer.state_dict()["state"]
        common = [self.state.to_json(), self.scheduler.state_dict(), self.optimizer.common_state()]
        return {"common": common, "lr": float(self.optimizer.param_groups[0]["lr"]), **tensors}

    def weights(self) -> dict[str, torch.Tensor]:
        return {info_of(p).name: p.detach().view(-1)[: info_of(p).box.numel].clone() for p in self.model.parameters()}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def same(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return x.dtype == y.dtype and torch.equal(x, y)
        return x == y

    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
