"""The memory of a unit on one rank: flat buffers of weights and gradients, and the rank's shards of them.

The whole weights are one flat tensor, and the parameters are views of it. If parameters are sharded, the storage of
this tensor is freed after each use and allocated again before the next one. The tensor object stays the same, so views
of it that autograd saved are valid again as soon as the weights are gathered.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, Pending, start_gather_rows
from megatron.core.communication.peer_rows import CopiedRows, PeerRows
from megatron.core.distributed.freed_parameter import mark_freed, mark_gathered
from megatron.core.distributed.main_grad import BufferMainGrad, attach_main_grad
from megatron.core.distributed.sharding_strategy import Sharding
from megatron.core.distributed.units import ParameterSlice, ParameterSlot, UnitPlan
from megatron.core.distributed.weight_file import FileShard, WeightFile


class Unit:
    """A unit with its memory. The constructor moves the parameters' values into the unit's buffer."""

    def __init__(
        self,
        plan: UnitPlan,
        shardings: Mapping[str, Sharding],
        shard_group: Group = None,
        weight_file: WeightFile | None = None,
    ) -> None:
        """`weight_file` is the place of the shard of sharded parameters; None: memory."""
        self.plan = plan
        self.shardings = shardings
        """The sharding of each grid, by name: that of this unit, and those of the others."""
        self.sharding = shardings[plan.grid]
        self.shard_range = self.sharding.shard_range(plan.numel)
        """Elements [start, stop) of the unit that this rank reduces, keeps optimizer state of, and updates."""
        self.parameter_slices = plan.parameter_slices(self.shard_range)
        self.device = plan.slots[0].parameter.device
        self.param_buffer = torch.zeros(plan.numel, dtype=plan.dtype, device=self.device)
        """[numel] in the model's type: the whole weights. Without memory while sharded parameters are not gathered."""
        for slot in plan.slots:
            view = slot.view_in(self.param_buffer.data)
            view.copy_(slot.parameter.data)
            slot.parameter.data = view
        self.weight_shard = self._shard_of(self.param_buffer)
        """[shard] in the model's type: the weights that this rank updates. In a file, see `fetch_shard`."""
        self._nbytes = self.param_buffer.untyped_storage().nbytes()
        self.shard_group = shard_group
        """The ranks that shard the unit."""
        self._gather: Pending | CopiedRows | None = None
        self._peers: tuple[PeerRows, int] | None = None
        """The memory with the shards of all ranks, and the byte at which `weight_shard` begins there."""
        self._is_stale = False
        if self.frees_parameters:
            self.weight_shard = self.weight_shard.clone()
            self._free_parameters()
        self.file_shard: FileShard | None = None
        """The shard, if it is in a file."""
        if weight_file is not None and self.shards_weights:
            self.file_shard = FileShard(weight_file, self.weight_shard, self.finish_all_gather)
        self.grad_buffer = torch.empty(0, dtype=plan.grad_dtype, device=self.device)
        """[numel] in the gradients' type: the whole gradients that this rank accumulates."""
        self.gradient_shard = self.grad_buffer
        """[shard] in the gradients' type: their sum over data parallel ranks, after the reduction."""
        self.main_grads: list[BufferMainGrad] = []
        """The accumulator of each slot."""

    @property
    def slots(self) -> tuple[ParameterSlot, ...]:
        """The positions of the parameters in the unit."""
        return self.plan.slots

    def _shard_of(self, buffer: Tensor) -> Tensor:
        return buffer[slice(*self.shard_range)]

    # Weights ---------------------------------------------------------------------------------------------------------

    @property
    def shards_weights(self) -> bool:
        """Whether whole weights have memory only around their use."""
        return self.sharding.strategy.shards_weights

    @property
    def frees_parameters(self) -> bool:
        """Whether parameters have no memory at most times."""
        return self.shards_weights

    gathers_after_all_updates = False
    """Whether the all-gather needs the updated weights of other units too."""

    @property
    def derives_shard(self) -> bool:
        """Whether the model's weights of the shard follow from the main weights, so that no update writes them."""
        return False

    def model_shard(self) -> Tensor:
        """Returns the weights that this rank updates, [shard] in the model's type, for reading: a copy if they are in a
        file."""
        self.fetch_shard()
        return self.weight_shard if self.file_shard is None else self.weight_shard.clone()

    def fetch_shard(self, changes: bool = False) -> None:
        """Gives `weight_shard` its memory, if it is in a file, until the shards of other units are fetched. `changes`:
        the caller writes to it. Raises UserError if the disk fails."""
        if self.file_shard is not None:
            self.file_shard.fetch(changes)
        elif changes:
            self.wait_for_readers()

    def wait_for_readers(self) -> None:
        """Lets later kernels wait until no other rank still copies the shard from this rank's memory."""
        if self._peers is not None:
            self._peers[0].wait_for_readers()

    def share_shard(self, peers: PeerRows, start: int, shard: Tensor) -> None:
        """From now on `weight_shard` is `shard`, with the same values, at byte `start` of memory that the ranks share.
        They gather it by copies."""
        self._peers, self.weight_shard = (peers, start), shard

    def read_ahead(self) -> None:
        """Starts to read a shard that is in a file."""
        if self.file_shard is not None:
            self.file_shard.read_ahead()

    def read_shard(self, start: int, stop: int) -> Tensor:
        """Returns the elements [start, stop) of a shard that may be in a file, in the model's type."""
        self.fetch_shard()
        return self.weight_shard[start:stop].clone()

    def write_shard(self, start: int, values: Tensor) -> None:
        """Replaces the elements of a shard that may be in a file, from `start` on."""
        self.fetch_shard(changes=True)
        self.weight_shard[start : start + values.numel()].copy_(values)

    @property
    def has_whole_weights(self) -> bool:
        """Whether the whole weights have memory. During an all-gather they do not yet have their values."""
        return self.param_buffer.untyped_storage().nbytes() > 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights between steps."""
        kept = self.weight_shard if self.shards_weights else self.param_buffer
        return kept.untyped_storage().nbytes()

    def mark_updated(self) -> None:
        """Call it after the optimizer has written new values to `weight_shard`: the whole weights are out of date."""
        assert self._gather is None, f"{self} is updated while it is gathered"
        self._is_stale = self.sharding.shards > 1
        self.reshard()
        if self.file_shard is not None:
            self.file_shard.release()

    def start_all_gather(self) -> None:
        """Starts the all-gather of whole weights, unless they are up to date."""
        if self._gather is not None or (self.has_whole_weights and not self._is_stale):
            return
        self.fetch_shard()
        if not self.has_whole_weights:
            self.param_buffer.untyped_storage().resize_(self._nbytes)
        self._is_stale = False
        if self._peers is None:
            self._gather = start_gather_rows(self.weight_shard, self.shard_group, out=self.param_buffer)
        else:
            self._gather = self._peers[0].start_gather(self._peers[1], self.param_buffer)

    def finish_all_gather(self) -> None:
        """Waits for a running all-gather; on CUDA, later kernels wait."""
        if self._gather is None:
            return
        self._gather.wait()
        self._gather = None
        if self.shards_weights:
            for slot in self.slots:
                mark_gathered(slot.parameter)

    def reshard(self) -> None:
        """Frees the memory of whole weights, if parameters are sharded."""
        if not self.shards_weights or not self.has_whole_weights:
            return
        self.finish_all_gather()  # it writes to this memory
        self._free_parameters()

    def _free_parameters(self, why: str | None = None) -> None:
        for slot in self.slots:
            mark_freed(slot.parameter, why)
        self.param_buffer.untyped_storage().resize_(0)

    def copy_to_shard(self) -> None:
        """Copies this rank's part of the whole weights to `weight_shard`. Call it after other code has written the
        whole weights."""
        if self.shards_weights:
            self.write_shard(0, self._shard_of(self.param_buffer))

    def replace_weights(self, shard: Tensor) -> list[Tensor]:
        """From now on the unit gathers the frozen weights in another form (NF4), of which `shard` is this rank's equal
        part. Returns each slot's part of the whole. The parameters stay without memory, and checkpoints do not get
        them."""
        assert self.shards_weights and self.file_shard is None and self._gather is None
        self.parameter_slices = ()
        self.weight_shard, self._peers = shard, None
        self.param_buffer = torch.empty(self.sharding.shards * shard.numel(), dtype=shard.dtype, device=self.device)
        self._nbytes = self.param_buffer.untyped_storage().nbytes()
        numel, total = self.plan.numel, self.param_buffer.numel()
        parts = [self.param_buffer[slot.start * total // numel : slot.stop * total // numel] for slot in self.slots]
        self.param_buffer.untyped_storage().resize_(0)
        return parts

    # Gradients -------------------------------------------------------------------------------------------------------

    def bind_gradients(
        self,
        buffer: Tensor,
        shard: Tensor,
        on_accumulated: Callable[[nn.Parameter], None],
        before_write: Callable[[], None] | None = None,
        factor: float = 1.0,
    ) -> None:
        """Lets the parameters accumulate their gradients into `buffer` ([numel] in the gradients' type).

        `before_write` is called before each contribution is written, `on_accumulated(parameter)` after it. Each
        contribution is multiplied by `factor`. After the reduction, `shard` has this rank's part of the sum.
        """
        assert buffer.shape == (self.plan.numel,) and buffer.dtype == self.plan.grad_dtype
        self.grad_buffer, self.gradient_shard = buffer, shard
        self.main_grads = [
            attach_main_grad(slot.parameter, slot.view_in(buffer), on_accumulated, before_write, factor)
            for slot in self.slots
        ]

    def all_gather_gradients(self) -> None:
        """Gathers the summed gradients of all shards into the whole gradients."""
        if self.sharding.shards > 1:
            start_gather_rows(self.gradient_shard, self.shard_group, out=self.grad_buffer).wait()

    def __repr__(self) -> str:
        return f"Unit({self.plan.name}, {self.plan.grid}, {self.plan.dtype}, {self.plan.numel} elements)"


class ShardWeights:
    """The part of a parameter in a rank's shard, as a checkpoint reads and writes it; an `EncodedTensor`."""

    def __init__(self, unit: Unit, part: ParameterSlice) -> None:
        self.unit, self.part = unit, part

    def decode(self) -> Tensor:
        """Returns the weights in the model's type."""
        return self.unit.read_shard(self.part.start, self.part.stop)

    def encode(self, values: Tensor) -> None:
        """Replaces the weights."""
        self.unit.write_shard(self.part.start, values)
