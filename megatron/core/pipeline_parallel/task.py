"""What a pipeline's runner is given to run, and where this rank stands in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.pipeline_parallel.p2p_communication import PipelineP2P
from megatron.core.pipeline_parallel.stages import Pipeline
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokens import RngPosition

ForwardStep = Callable[..., tuple[Tensor, Callable[..., Any] | None]]


@dataclass(frozen=True)
class Task:
    """What is run for every micro-batch."""

    forward_step_func: ForwardStep
    """(data_iterator, model) -> (output, loss_func); see `get_forward_backward_func`."""
    data_iterators: Sequence[Any]
    """One for each chunk."""
    chunks: Sequence[nn.Module]
    """This rank's model chunks."""
    config: Any
    groups: ProcessGroupCollection
    pipeline: Pipeline
    num_microbatches: int
    p2p: PipelineP2P | None = None
    """None where one rank has all stages."""
    collect_non_loss_data: bool = False
    rng_position_of: Callable[[int], RngPosition] | None = None
    """Returns the position for random numbers of the micro-batch with this number; called on every stage."""
    states: Sequence[int] = ()
    """How many hidden states each stage gets from the one before (`stages.states_into_stages`); empty: one each."""

    def stage(self, chunk: int) -> int:
        return self.pipeline.stage(self.groups.rank("pp"), chunk)

    def states_into(self, stage: int) -> int:
        return self.states[stage] if self.states else 1

    def neighbour(self, chunk: int, step: int) -> int | None:
        """The chunk of this same rank that is the stage before (-1) or after (+1) a chunk; None: another rank's."""
        stage = self.stage(chunk) + step
        if not 0 <= stage < self.pipeline.num_stages:
            return None
        rank, neighbour = self.pipeline.place(stage)
        return neighbour if rank == self.groups.rank("pp") else None
