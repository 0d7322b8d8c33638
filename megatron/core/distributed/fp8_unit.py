"""Units whose whole weights exist only in fp8 (`--fp8-param-gather`).

The weights of fp8 linear layers are units of their own. The owner of a shard rounds its weights to fp8, and the bytes
are gathered; layers read them there. The parameters have no memory. A rank's shard in the model's type exists only
where it does not follow from the main weights.

The values are those of a run that gathers weights in the model's type and quantises them: a shard is rounded to the
model's type first, and a scale follows from the largest value of all shards.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.communication.collectives import Group, all_reduce, start_gather_rows
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.freed_parameter import mark_gathered
from megatron.core.distributed.sharding_strategy import Sharding
from megatron.core.distributed.units import ParameterSlice, ParameterSlot, UnitPlan
from megatron.core.ops.fp8.linear import QuantizedWeights
from megatron.core.ops.fp8.recipes import Role

_WHY_FREED = (
    "with --fp8-param-gather the weight of an fp8 layer exists only in fp8, for this layer; code that reads its values "
    "runs without the flag, or inside `whole_weights()` of the data parallel wrapper"
)


class Fp8Unit(Unit):
    """A unit with its memory, whose weights are gathered in fp8."""

    def __init__(
        self,
        plan: UnitPlan,
        shardings: Mapping[str, Sharding],
        shard_group: Group,
        layers: Mapping[Tensor, QuantizedWeights],
        quantize: Callable[[], None],
    ) -> None:
        """`layers` has the layer that reads each parameter. `quantize()` quantises the shards of all units that have
        changed, with `quantize_units`."""
        super().__init__(plan, shardings, shard_group)
        self._quantize_changed = quantize
        self._source: Tensor | None = None
        self.codes = torch.zeros(plan.numel, dtype=torch.uint8, device=self.device)
        """[numel]: the whole weights in fp8. With sharded parameters, without memory while they are not gathered."""
        self.code_shard = self._shard_of(self.codes)
        """[shard]: the weights in fp8 that this rank has quantised."""
        if self.shards_weights:
            self.code_shard = self.code_shard.clone()
            self.codes.untyped_storage().resize_(0)
        self.is_changed = True
        """Whether the weights have changed since they were quantised."""
        self._is_whole = False
        self._gathers = 0
        self.weights = [Fp8Weight(self, slot, layers[slot.parameter]) for slot in self.slots]
        """The weights of the unit, in the order of its slots."""

    # The shard in the model's type -----------------------------------------------------------------------------------

    gathers_after_all_updates = True

    @property
    def frees_parameters(self) -> bool:
        """Whether parameters have no memory at most times: always."""
        return True

    def derive_shard_from(self, main_weights: Tensor) -> None:
        """From now on the shard in the model's type is `main_weights` [shard], rounded. Frees its memory."""
        self._source = main_weights
        self._drop_shard()

    @property
    def derives_shard(self) -> bool:
        """Whether the shard in the model's type follows from the main weights."""
        return self._source is not None

    @property
    def shard_source(self) -> Tensor:
        """[shard]: numbers that round to the shard in the model's type."""
        if self._source is None or self.weight_shard.untyped_storage().nbytes():
            return self.weight_shard
        return self._source

    def model_shard(self) -> Tensor:
        """Returns the weights that this rank updates, [shard] in the model's type: for reading, perhaps a copy."""
        return self.shard_source.to(self.plan.dtype)

    def read_shard(self, start: int, stop: int) -> Tensor:
        """Returns the elements [start, stop) of the shard, in the model's type."""
        return self.shard_source[start:stop].to(self.plan.dtype)

    @property
    def holds_shard(self) -> bool:
        """Whether the shard in the model's type has memory."""
        return self.shard_source is self.weight_shard

    def hold_shard(self) -> None:
        """Gives the shard in the model's type memory until the weights are quantised. What is written there is used
        until the next update; the optimizer's main weights must be loaded too."""
        if not self.holds_shard:
            self.weight_shard.untyped_storage().resize_(self.weight_shard.numel() * self.plan.dtype.itemsize)
            self.weight_shard.copy_(self._source)  # type: ignore[arg-type]
        self.mark_changed()

    def write_shard(self, start: int, values: Tensor) -> None:
        """Replaces the elements of the shard from `start` on; see `hold_shard`."""
        self.hold_shard()
        self.weight_shard[start : start + values.numel()].copy_(values)

    def copy_to_shard(self) -> None:
        """Copies this rank's part of the whole weights to the shard; see `whole_weights` of the wrapper."""
        self.write_shard(0, self._shard_of(self.param_buffer))

    # Quantisation ----------------------------------------------------------------------------------------------------

    def mark_updated(self) -> None:
        """Call it after the optimizer has updated the shard: the weights in fp8 are out of date, and so is a shard that
        follows from the main weights."""
        self._drop_shard()
        self.mark_changed()

    def mark_changed(self) -> None:
        """Call it when the shard may have changed: the weights in fp8 are out of date."""
        self.finish_all_gather()
        self.is_changed, self._is_whole = True, False
        self.reshard()

    def _drop_shard(self) -> None:
        if self.derives_shard:
            self.weight_shard.untyped_storage().resize_(0)

    def quantized(self) -> None:
        """Call it after `code_shard` has been written."""
        self.is_changed = False
        self._is_whole = self.sharding.shards == 1
        self._gathers += 1
        self._drop_shard()

    # Gathering -------------------------------------------------------------------------------------------------------

    @property
    def has_whole_weights(self) -> bool:
        """Whether the whole weights have memory, in fp8."""
        return self.codes.untyped_storage().nbytes() > 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights between steps: in fp8, and of the shard in the model's type."""
        codes = self.code_shard if self.shards_weights else self.codes
        return codes.nbytes + (0 if self.derives_shard else self.weight_shard.nbytes)

    def start_all_gather(self) -> None:
        """Quantises the shards of all units that have changed, and starts the all-gather of this unit in fp8, unless it
        is up to date."""
        if self.is_changed:
            self._quantize_changed()
        if self._gather is not None or self._is_whole:
            return
        if not self.has_whole_weights:
            self.codes.untyped_storage().resize_(self.plan.numel)
        self._gather = start_gather_rows(self.code_shard, self.shard_group, out=self.codes)
        self._gathers += 1

    def finish_all_gather(self) -> None:
        """Waits for a running all-gather; on CUDA, later kernels wait."""
        if self._gather is not None:
            self._gather.wait()
            self._gather, self._is_whole = None, True

    def reshard(self) -> None:
        """Frees the memory of whole weights, if parameters are sharded."""
        if self.shards_weights and self.has_whole_weights:
            self.finish_all_gather()  # it writes to this memory
            self.codes.untyped_storage().resize_(0)
            self._is_whole = False

    @property
    def gathers(self) -> int:
        """A number that changes whenever the weights in fp8 do."""
        return self._gathers

    def gather_model_weights(self) -> None:
        """Gives the parameters memory with the whole weights in the model's type, until `free_model_weights`."""
        self.param_buffer.untyped_storage().resize_(self._nbytes)
        shard = self._shard_of(self.param_buffer)
        shard.copy_(self.shard_source)
        start_gather_rows(shard, self.shard_group, out=self.param_buffer).wait()
        for slot in self.slots:
            mark_gathered(slot.parameter)

    def free_model_weights(self) -> None:
        """Frees what `gather_model_weights` allocated."""
        self._free_parameters()

    def _free_parameters(self, why: str | None = _WHY_FREED) -> None:
        super()._free_parameters(why)


class Fp8Weight:
    """One weight of a unit, for the layer that reads it."""

    def __init__(self, unit: Fp8Unit, slot: ParameterSlot, layer: QuantizedWeights) -> None:
        self.unit, self.slot, self.layer, self.blocks = unit, slot, layer, layer.weight_blocks()
        self.scales: Tensor | None = None
        layer.take_gathered_weight(self)

    def gathered(self) -> tuple[int, Tensor, Tensor]:
        """Returns the state of the gather, the weight in fp8 and its scales; see `GatheredWeight`."""
        self.unit.start_all_gather()
        self.unit.finish_all_gather()
        assert self.scales is not None
        codes = self.slot.view_in(self.unit.codes).view(self.layer.settings.dtype(Role.WEIGHTS))
        return self.unit.gathers, codes, self.scales


@torch.no_grad()
def quantize_units(units: Sequence[Fp8Unit]) -> None:
    """Quantises the shards of units. All ranks of a shard group call this with the same units.

    Largest values are taken over the ranks that share a weight, with one all-reduce for each group and any number
    of weights.
    """
    weights = [weight for unit in units for weight in unit.weights]
    if not weights:
        return
    ends = torch.tensor([weight.blocks.number for weight in weights]).cumsum(0).tolist()
    # Compared as integers: of two non-negative floats the larger one has the larger bits, and those of NaN are larger.
    largest = torch.zeros(ends[-1], dtype=torch.float32, device=units[0].device)
    largest_of = dict(zip(weights, largest.tensor_split(ends[:-1]), strict=True))
    for weight, part, values in _parts(units):
        kernels = weight.layer.settings.kernels.weights
        kernels.largest_of_blocks(values, _begin(part), weight.blocks, weight.unit.plan.dtype, largest_of[weight])
    _share_largest(units, largest_of)
    for weight in weights:
        weight.scales = weight.layer.scaling.weight_scales(largest_of[weight].view(weight.blocks.shape))
    for weight, part, values in _parts(units):
        kernels = weight.layer.settings.kernels.weights
        codes = part.view_in(weight.unit.code_shard).view(weight.layer.settings.dtype(Role.WEIGHTS))
        assert weight.scales is not None
        scales = weight.scales.flatten() if weight.scales.dim() else weight.scales
        kernels.cast_blocks(values, _begin(part), weight.blocks, weight.unit.plan.dtype, scales, codes)
    for unit in units:
        unit.quantized()


def _parts(units: Sequence[Fp8Unit]) -> "list[tuple[Fp8Weight, ParameterSlice, Tensor]]":
    """Returns the parts of weights in this rank's shards, and the numbers that round to them."""
    found = []
    for unit in units:
        of_slot = {weight.slot.start: weight for weight in unit.weights}
        source = unit.shard_source
        found += [(of_slot[part.slot.start], part, part.view_in(source)) for part in unit.parameter_slices]
    return found


def _begin(part: ParameterSlice) -> int:
    return 0 if part.flat_range is None else part.flat_range[0]


def _share_largest(units: Sequence[Fp8Unit], largest_of: Mapping[Fp8Weight, Tensor]) -> None:
    """Takes the largest values over the ranks that shard a weight, and over those that divide it."""
    by_group: dict[Group, list[Tensor]] = {}
    for unit in units:
        if unit.sharding.shards > 1:
            by_group.setdefault(unit.shard_group, []).extend(largest_of[weight] for weight in unit.weights)
    _take_largest(by_group)
    by_group = {}
    for unit in units:
        for weight in unit.weights:
            for group in weight.layer.scaling.weight_groups():
                by_group.setdefault(group, []).append(largest_of[weight])
    _take_largest(by_group)


def _take_largest(by_group: Mapping[Group, Sequence[Tensor]]) -> None:
    for group, members in by_group.items():
        flat = all_reduce(torch.cat([member.view(torch.int32) for member in members]), group, dist.ReduceOp.MAX)
        for member, taken in zip(members, flat.split([m.numel() for m in members]), strict=True):
            member.view(torch.int32).copy_(taken)
