"""The input of a pipeline's runner, and the position of this rank in the pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.p2p_communication import ONE_STATE, PipelineP2P
from megatron.core.pipeline_parallel.stages import Pipeline, StatesIn
from megatron.core.tokens import RngPosition

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

ForwardStep = Callable[..., tuple[Tensor, Callable[..., Any] | None]]


@dataclass(frozen=True)
class PipelineTask:
    """What the runner executes for every micro-batch."""

    forward_step_func: ForwardStep
    """(data_iterator, model) -> (output, loss_func); see `get_forward_backward_func`."""
    data_iterators: Sequence[Any]
    """One for each chunk."""
    chunks: Sequence[nn.Module]
    """This rank's model chunks."""
    config: "TransformerConfig"
    """The TransformerConfig of the model."""
    groups: ProcessGroupCollection
    pipeline: Pipeline
    num_microbatches: int
    p2p: PipelineP2P | None = None
    """None if one rank has all stages."""
    collect_non_loss_data: bool = False
    rng_position_of: Callable[[int], RngPosition] | None = None
    """Returns the position for random numbers of the micro-batch with this number; called on every stage."""
    grad_scale_func: Callable[[Tensor], Tensor] | None = None
    """Multiplies a loss by the loss scale before backward; None: losses are not scaled."""
    states_in: Sequence[StatesIn] = ()
    """Hidden states that each stage receives (`stages.states_into_stages`); empty: one per token."""

    def stage_index(self, chunk: int) -> int:
        """Returns the index of the stage that is this chunk of this rank."""
        return self.pipeline.stage_index(self.groups.rank("pp"), chunk)

    def states_into(self, stage: int) -> StatesIn:
        """Returns the hidden states that a stage receives."""
        return self.states_in[stage] if self.states_in else ONE_STATE

    def local_neighbour(self, chunk: int, step: int) -> int | None:
        """Returns the chunk of this rank that is the stage before (step -1) or after (+1) a chunk; None if that stage
        is on another rank or does not exist."""
        stage = self.stage_index(chunk) + step
        if not 0 <= stage < self.pipeline.num_stages:
            return None
        rank, neighbour = self.pipeline.locate(stage)
        return neighbour if rank == self.groups.rank("pp") else None
