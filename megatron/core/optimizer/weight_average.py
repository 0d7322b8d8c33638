"""An exponential moving average of the weights, sharded like the optimizer's state (Polyak and Juditsky 1992)."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.state_storage import Plain
from megatron.core.optimizer.unit_state import UnitState


class WeightAverage:
    """a <- d a + (1 - d) w after each applied update, in the main type, with d = min(decay, (1 + n) / (10 + n)) after n
    updates: the first weights, which are random, are forgotten quickly. It begins with the weights themselves."""

    def __init__(self, states: Sequence[UnitState], chunks: Sequence[DistributedDataParallel], decay: float) -> None:
        self.states, self.chunks, self.decay = states, chunks, decay
        self.values = [Plain(state.weights.decode().clone(), state.weights.main) for state in states]
        """The average of each unit's shard."""

    @torch.no_grad()
    def update(self, applied: Tensor, update_count: Tensor) -> None:
        """Adds the weights to the average if the bool scalar `applied` is True. `update_count` includes this update.
        Does not wait for the device."""
        decay = ((1.0 + update_count.double()) / (10.0 + update_count.double())).clamp(max=self.decay)
        share = (1.0 - decay) * applied
        for average, state in zip(self.values, self.states, strict=True):
            average.tensor.lerp_(state.weights.decode(), share.to(average.main))

    @torch.no_grad()
    def restart(self) -> None:
        """Begins anew with the current weights."""
        for average, state in zip(self.values, self.states, strict=True):
            average.tensor.copy_(state.weights.decode())

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Inside the context the model computes with the average. Afterwards its weights are what they were, to the
        bit. Needs memory for another copy of this rank's shard. Collective."""
        kept = [state.unit.weight_shard.clone() for state in self.states]
        self._write([average.tensor for average in self.values])
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for chunk in self.chunks:
            chunk.finish_param_sync()
        for state, shard in zip(self.states, values, strict=True):
            state.unit.weight_shard.copy_(shard)
            state.unit.mark_updated()
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)
