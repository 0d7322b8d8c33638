"""Plans of units: the flat buffers of a layer, the embedding or the head, times (grid, type).

A unit holds the weights of its parameters end to end in one flat buffer, of which the parameters are views, and their
gradients in the same order in another, which the parameters' main gradients write. Reduction, update and
checkpoint see flat ranges; layers see ordinary parameters. Which range of a unit a rank owns is its sharding's affair.

Which parameter lies where is a pure function of canonical names, shapes and the number of shards (`plan_units`), so
that all ranks agree without asking, and a dry run can count bytes on a meta device.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.parameters import ParameterInfo, canonical_names, info_of

ALIGNMENT = 64
"""Elements: parameters start at multiples of 128 bytes even in 16-bit types, as matrix kernels and copies like it."""

_UP_TO_FIRST_NUMBER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its unit: elements [start, stop). Its padding, if any, is the end of that."""

    parameter: nn.Parameter
    info: ParameterInfo
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()

    @property
    def box_stop(self) -> int:
        """Where the box ends and padding begins."""
        return self.start + self.info.box.numel

    def of(self, buffer: Tensor) -> Tensor:
        """The parameter's box in a flat buffer of the whole unit, without padding: a one-dimensional view."""
        return buffer[self.start : self.box_stop]

    def shaped(self, buffer: Tensor) -> Tensor:
        """The whole slot in a flat buffer of the whole unit, shaped as the parameter."""
        return buffer[self.start : self.stop].view(self.parameter.shape)


@dataclass(frozen=True)
class ParameterSlice:
    """What a rank owns of one parameter's box: elements [start, stop) of what it owns of the unit."""

    slot: Slot
    start: int
    stop: int
    flat_range: tuple[int, int] | None
    """The same elements as counted in the box; None: all of it."""

    @property
    def info(self) -> ParameterInfo:
        return self.slot.info

    def of(self, owned: Tensor) -> Tensor:
        """The parameter_slice in a flat tensor of what the rank owns: a one-dimensional view."""
        return owned[self.start : self.stop]


@dataclass(frozen=True)
class UnitPlan:
    """The layout of a unit."""

    name: str
    grid: str
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int
    """Elements of each of its whole buffers: the parameters, what aligns them, and what makes all shards equal."""

    @property
    def main_dtype(self) -> torch.dtype:
        """Type of gradients, and of the weights that the optimizer updates: float32, or wider if the model is."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def needs_main_weights(self) -> bool:
        """The model's weights are too narrow to be updated in place."""
        return self.main_dtype != self.dtype

    def parameter_slices(self, owned: tuple[int, int]) -> tuple[ParameterSlice, ...]:
        """What a range of the unit holds of each parameter's box, for those of which it holds anything."""
        first, end = owned
        found = []
        for slot in self.slots:
            start, stop = max(slot.start, first), min(slot.box_stop, end)
            if start < stop:
                whole = (start, stop) == (slot.start, slot.box_stop)
                part = None if whole else (start - slot.start, stop - slot.start)
                found.append(ParameterSlice(slot, start - first, stop - first, part))
        return tuple(found)


def plan_units(module: nn.Module, shards: Mapping[str, int] | None = None) -> list[UnitPlan]:
    """The units of a model chunk, in the order of its modules. Parameters that need no gradient are left alone.

    A unit is what shares a name up to its first number (`decoder.layers.3`), else its first word (`embedding`); a
    weight that another stage holds too is a unit of its own, so that both stages share it out alike. Within a unit
    decayed parameters come first, so that weight decay acts on one run. `shards`: into how many equal parts units of
    each grid are cut (default 1).
    """
    members: dict[tuple[str, str, torch.dtype], list[tuple[nn.Parameter, ParameterInfo]]] = {}
    for parameter, info in named_infos(module):
        if parameter.requires_grad:
            members.setdefault((unit_name(info), info.grid, parameter.dtype), []).append((parameter, info))
    return [_plan(*key, parameters, (shards or {}).get(key[1], 1)) for key, parameters in members.items()]


def unit_name(info: ParameterInfo) -> str:
    """The unit that a parameter belongs to."""
    if info.tied:
        return info.name
    numbered = _UP_TO_FIRST_NUMBER.match(info.name)
    return numbered[1] if numbered else info.name.partition(".")[0]


def named_infos(module: nn.Module) -> Iterable[tuple[nn.Parameter, ParameterInfo]]:
    """Parameters and descriptors of a model, wrapped or not; a name is given to those whose model gave them none."""
    for path, parameter in canonical_names(module):
        info = info_of(parameter)
        if not info.name:
            info = dataclasses.replace(info, name=re.sub(r"^(module\.)+", "", path))
            parameter.info = info  # type: ignore[attr-defined]
        yield parameter, info


def _plan(
    name: str, grid: str, dtype: torch.dtype, parameters: list[tuple[nn.Parameter, ParameterInfo]], shards: int
) -> UnitPlan:
    slots, end = [], 0
    for parameter, info in sorted(parameters, key=lambda member: (not member[1].decays, member[1].embedding_or_output)):
        slots.append(Slot(parameter, info, end))
        end = _round_up(end + parameter.numel(), ALIGNMENT)
    return UnitPlan(name, grid, dtype, tuple(slots), _round_up(end, ALIGNMENT * shards))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
