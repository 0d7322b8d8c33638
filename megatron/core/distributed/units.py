"""Plans units. A unit holds those parameters of a layer, the embedding or the head that share a grid and a type. The
weights of fp8 layers have units of their own. Frozen weights that ranks shard have units without gradients.

The weights of a unit's parameters are concatenated in one flat buffer, and their gradients, in the same order, in
another one. The parameters and their main gradients are views of these buffers: reductions, the optimizer and
checkpoints see flat ranges, layers see ordinary parameters. `sharding_strategy` decides which range of a unit is a
rank's shard.

The position of each parameter is a pure function of canonical names, shapes and the number of shards (`plan_units`). So
all ranks agree without communication, and a dry run can count bytes on the meta device.
"""

import dataclasses
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.ops.fp8.linear import QuantizedWeights
from megatron.core.parameters import ParameterInfo, canonical_names, has_initial_value, info_of

ALIGNMENT = 64
"""In elements: parameters start at multiples of 128 bytes even in 16-bit types, for fast matrix kernels and copies."""

_UP_TO_FIRST_NUMBER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class ParameterSlot:
    """The position of one parameter in its unit: elements [start, stop), of which the last ones can be padding."""

    parameter: nn.Parameter
    info: ParameterInfo
    start: int

    @property
    def stop(self) -> int:
        """End of the slot."""
        return self.start + self.parameter.numel()

    @property
    def box_stop(self) -> int:
        """End of the box, where padding begins."""
        return self.start + self.info.box.numel

    def box_view_in(self, buffer: Tensor) -> Tensor:
        """Returns the parameter's box in a flat buffer of the unit, without padding, as a one-dimensional view."""
        return buffer[self.start : self.box_stop]

    def view_in(self, buffer: Tensor) -> Tensor:
        """Returns the slot in a flat buffer of the unit as a view shaped as the parameter."""
        return buffer[self.start : self.stop].view(self.parameter.shape)


@dataclass(frozen=True)
class ParameterSlice:
    """The part of one parameter's box in a rank's shard: elements [start, stop) of the shard."""

    slot: ParameterSlot
    start: int
    stop: int
    flat_range: tuple[int, int] | None
    """These elements as a range of the box; None: all of the box."""

    @property
    def info(self) -> ParameterInfo:
        """The descriptor of the parameter."""
        return self.slot.info

    def view_in(self, shard: Tensor) -> Tensor:
        """Returns the slice as a one-dimensional view of the rank's shard."""
        return shard[self.start : self.stop]


@dataclass(frozen=True)
class UnitPlan:
    """The layout of a unit."""

    name: str
    grid: str
    dtype: torch.dtype
    slots: tuple[ParameterSlot, ...]
    numel: int
    """Elements of each whole buffer: the parameters, their alignment, and padding that makes all shards equal."""
    in_fp8: bool = False
    """Whether the parameters are weights that fp8 layers quantise."""
    gathers_in_fp8: bool = False
    """Whether these layers can read weights that exist only in fp8."""
    narrow_gradients: bool = False
    """Whether gradients are accumulated in the model's type although it is narrower than float32."""
    in_nf4: bool = False
    """Whether the parameters are frozen weights that layers will read in 4 bits."""

    @property
    def main_dtype(self) -> torch.dtype:
        """Type of the weights that the optimizer updates: float32, or the model's type if that is wider."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def grad_dtype(self) -> torch.dtype:
        """Type of the main gradients: the main type, or the model's with `narrow_gradients`."""
        return self.dtype if self.narrow_gradients else self.main_dtype

    @property
    def needs_main_weights(self) -> bool:
        """Whether the optimizer keeps main weights because the model's type is narrower than the main type."""
        return self.main_dtype != self.dtype

    def parameter_slices(self, shard_range: tuple[int, int]) -> tuple[ParameterSlice, ...]:
        """Returns the slices of parameters' boxes in a range of the unit."""
        first, end = shard_range
        found = []
        for slot in self.slots:
            start, stop = max(slot.start, first), min(slot.box_stop, end)
            if start < stop:
                whole = (start, stop) == (slot.start, slot.box_stop)
                part = None if whole else (start - slot.start, stop - slot.start)
                found.append(ParameterSlice(slot, start - first, stop - first, part))
        return tuple(found)


def plan_units(
    module: nn.Module, shards: Mapping[str, int] | None = None, main_grads_dtype: torch.dtype = torch.float32
) -> list[UnitPlan]:
    """Returns the units of the parameters of a model chunk that are trained, in the order of its modules.

    The parameters of a unit share their name up to its first number (`decoder.layers.3`) or, without a number, its
    first word (`embedding`). A weight that another stage holds too is a unit of its own, so that both stages shard it
    in the same way. The weights of fp8 layers are a unit of their own, so that they can be gathered in fp8, also in a
    run that does not, so that its sums over shards are equal. In a unit, parameters with weight decay come first, so
    that weight decay acts on one range.
    `shards` is the number of equal shards of each grid's units (default 1). Parameters of the type `main_grads_dtype`,
    if it is not float32, accumulate their gradients in it.
    """
    layers = {layer.own_weight: layer for layer in module.modules() if isinstance(layer, QuantizedWeights)}
    plans = _plans(module, shards or {}, lambda parameter, info: parameter.requires_grad, layers.keys())
    return [
        dataclasses.replace(
            plan,
            gathers_in_fp8=plan.in_fp8 and all(layers[slot.parameter].can_gather_weight for slot in plan.slots),
            narrow_gradients=plan.dtype is main_grads_dtype and main_grads_dtype is not torch.float32,
        )
        for plan in plans
    ]


def plan_frozen_units(module: nn.Module, shards: Mapping[str, int]) -> list[UnitPlan]:
    """Returns the units of the frozen weights of a model chunk that data parallel ranks shard: those of the grids in
    `shards` (the number of shards of each). Every rank keeps all other parameters without gradient whole: what code
    may write while the run goes on, so also parameters that were never declared."""

    def is_sharded(parameter: nn.Parameter, info: ParameterInfo) -> bool:
        return not parameter.requires_grad and info.grid in shards and has_initial_value(info) and not info.is_state

    return _plans(module, shards, is_sharded)


def _plans(
    module: nn.Module,
    shards: Mapping[str, int],
    belongs: Callable[[nn.Parameter, ParameterInfo], bool],
    in_fp8: Container[Tensor] = (),
) -> list[UnitPlan]:
    members: dict[tuple[str, str, torch.dtype, bool, bool], list[tuple[nn.Parameter, ParameterInfo]]] = {}
    for parameter, info in named_infos(module):
        if belongs(parameter, info):
            key = unit_name(info), info.grid, parameter.dtype, parameter in in_fp8, info.in_nf4
            members.setdefault(key, []).append((parameter, info))
    return [_plan(*key, parameters, shards.get(key[1], 1)) for key, parameters in members.items()]


def unit_name(info: ParameterInfo) -> str:
    """Returns the name of the unit that a parameter belongs to."""
    if info.tied:
        return info.name
    numbered = _UP_TO_FIRST_NUMBER.match(info.name)
    return numbered[1] if numbered else info.name.partition(".")[0]


def named_infos(module: nn.Module) -> Iterable[tuple[nn.Parameter, ParameterInfo]]:
    """Yields the parameters of a model, wrapped or not, with their descriptors. Unnamed descriptors get a name."""
    for path, parameter in canonical_names(module):
        info = info_of(parameter)
        if not info.name:
            info = dataclasses.replace(info, name=re.sub(r"^(module\.)+", "", path))
            parameter.info = info  # type: ignore[attr-defined]
        yield parameter, info


def _plan(
    name: str,
    grid: str,
    dtype: torch.dtype,
    in_fp8: bool,
    in_nf4: bool,
    parameters: list[tuple[nn.Parameter, ParameterInfo]],
    shards: int,
) -> UnitPlan:
    slots, end = [], 0
    for parameter, info in sorted(parameters, key=lambda member: (not member[1].decays, member[1].embedding_or_output)):
        slots.append(ParameterSlot(parameter, info, end))
        end = _round_up(end + parameter.numel(), ALIGNMENT)
    return UnitPlan(name, grid, dtype, tuple(slots), _round_up(end, ALIGNMENT * shards), in_fp8, in_nf4=in_nf4)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
