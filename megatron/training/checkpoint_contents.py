"""The parts of a run that its checkpoints keep, and their tensors as checkpoint chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.dist_checkpointing.chunk import AVERAGE, MASTER, Chunk, model_chunks, optimizer_state_name
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.sharding_strategy import replica_ranks
from megatron.core.distributed.units import named_infos
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.loss_spikes import LossSpikes
from megatron.training.state import TrainState


@dataclass(frozen=True)
class SavedParts:
    """The parts of a run whose state its checkpoints keep. A load changes these objects in place."""

    state: TrainState
    model: Sequence[DistributedDataParallel]
    """This rank's chunks. Scripts may also save and load modules without the wrapper."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    spikes: LossSpikes | None = None
    """Judges the losses; None without --loss-spike-action."""


def weight_chunks(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> Iterator[Chunk]:
    """Yields the weights that this rank holds, as checkpoint chunks over live memory."""
    for part in model:
        if isinstance(part, DistributedDataParallel):
            yield from part.weight_chunks()
        else:
            yield from model_chunks(part, lambda info: replica_ranks(info, groups))


def weights_are_finite(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> bool:
    """Returns whether all weights on all ranks are finite. Waits for the device. Collective."""
    largest = [
        torch.linalg.vector_norm(chunk.values(), torch.inf)  # needs no memory for each element, as isfinite does
        for chunk in weight_chunks(model, groups)
        if chunk.tensor.numel() and chunk.tensor.is_floating_point()
    ]
    mine = bool(torch.stack([value.isfinite() for value in largest]).all()) if largest else True
    return all(RankCoordinator().gather(mine))


def checkpoint_bytes(parts: SavedParts, groups: ProcessGroupCollection, with_optimizer: bool) -> float:
    """Returns this rank's share of the bytes of a checkpoint's tensors: ranks that hold the same tensor share it
    equally. Changes nothing. Weights that exist only in fp8 count with one byte per element, although files store them
    in the model's type."""
    weights = (
        info.box.numel * parameter.element_size() / len(replica_ranks(info, groups))
        for part in parts.model
        for parameter, info in named_infos(part)
    )
    states = parts.optimizer.state_chunks() if with_optimizer else ()
    return sum(weights) + sum(chunk.tensor.nbytes / max(len(chunk.holders), 1) for chunk in states)


def optimizer_chunks_to_load(
    optimizer: MegatronOptimizer, with_optimizer: bool, with_average: bool = False
) -> Iterator[Chunk]:
    """Yields the optimizer's chunks that a load fills: all of them, or only the main weights if optimizer state is not
    loaded, and the moving average of the weights `with_average`. Main weights are always loaded together with the
    weights."""
    kinds = (MASTER, AVERAGE) if with_average else (MASTER,)
    prefixes = tuple(optimizer_state_name(kind, "") for kind in kinds)
    return (chunk for chunk in optimizer.state_chunks() if with_optimizer or chunk.name.startswith(prefixes))
