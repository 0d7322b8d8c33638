"""What training changes and a checkpoint keeps: `TrainState`, the counts; `SavedParts`, all parts of a run whose state
is kept; and their tensors as checkpoint chunks."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.core.adapters.attach import is_adapter
from megatron.core.dist_checkpointing.chunk import AVERAGE, MASTER, Chunk, model_chunks, optimizer_state_name
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.sharding_strategy import replica_ranks
from megatron.core.distributed.units import named_infos
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.loss_spikes import LossSpikes


@dataclass
class TrainState:
    """Counts since the beginning of the run, over all ranks. Only the training loop changes them."""

    iteration: int = 0
    """Iterations done."""
    consumed_train_samples: int = 0
    """Samples that training took from its data. Also the number of the next sample, from 0."""
    skipped_train_samples: int = 0
    """Those of the consumed samples whose iterations were skipped on request."""
    consumed_valid_samples: int = 0
    """Samples of all evaluations on the validation set. With --eval-fresh-samples, also the next one's first."""
    consumed_tokens: int = 0
    """Tokens of the consumed training samples."""
    floating_point_operations_so_far: float = 0.0
    """Operations of the model, computed by formula."""

    def add_step(self, samples: int, tokens: int, operations: float = 0.0) -> None:
        """Counts an iteration that trained on this number of samples and tokens, with `operations` of the model."""
        self.iteration += 1
        self.consumed_train_samples += samples
        self.consumed_tokens += tokens
        self.floating_point_operations_so_far += operations

    def add_skipped_step(self, samples: int) -> None:
        """Counts an iteration whose samples were read and not trained on."""
        self.iteration += 1
        self.consumed_train_samples += samples
        self.skipped_train_samples += samples

    def to_json(self) -> dict[str, int | float]:
        """Returns the counts by name, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], source: str = "the training state") -> "TrainState":
        """Builds the state that `to_json` described. Counts that an older release did not save start at 0. Raises
        UserError, naming the source, for an unknown count."""
        unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise UserError(f"{source} holds {', '.join(unknown)}, which this release does not know")
        return cls(**fields)

    def restore(self, other: "TrainState") -> None:
        """Copies another state's counts into this object, so that all references to this object see them."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(other, field.name))


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
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            yield from chunk.weight_chunks()
        else:
            yield from model_chunks(chunk, lambda info: replica_ranks(info, groups))


def kept_weight_chunks(
    model: Sequence[nn.Module], groups: ProcessGroupCollection, *, adapters_alone: bool
) -> Iterator[Chunk]:
    """Yields those of `weight_chunks` that checkpoints of a run keep: the adapters alone if it trains adapters."""
    return (chunk for chunk in weight_chunks(model, groups) if is_adapter(chunk.name) or not adapters_alone)


def weights_are_finite(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> bool:
    """Returns whether all weights on all ranks are finite. Waits for the device. Collective."""
    largest = [
        torch.linalg.vector_norm(chunk.values(), torch.inf)  # needs no memory for each element, as isfinite does
        for chunk in weight_chunks(model, groups)
        if chunk.tensor.numel() and chunk.tensor.is_floating_point()
    ]
    mine = bool(torch.stack([value.isfinite() for value in largest]).all()) if largest else True
    return all(RankCoordinator().gather(mine))


def checkpoint_bytes(
    parts: SavedParts, groups: ProcessGroupCollection, with_optimizer: bool, *, adapters_alone: bool = False
) -> float:
    """Returns this rank's share of the bytes of a checkpoint's tensors: ranks that hold the same tensor share it
    equally. Changes nothing. Weights that exist only in fp8 count with one byte per element, although files store them
    in the model's type."""
    weights = (
        info.box.numel * parameter.element_size() / len(replica_ranks(info, groups))
        for chunk in parts.model
        for parameter, info in named_infos(chunk)
        if is_adapter(info.name) or not adapters_alone
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
