"""Units: the flat buffers of a layer, the embedding or the head, times (grid, type).

A unit holds the weights of its parameters end to end in `param_buffer`, of which the parameters are views, and their
gradients in the same order in `grad_buffer`, which the parameters' sinks write. Reduction, update and checkpoint see
flat ranges; layers see ordinary parameters. Who owns which range of a unit is its placement's affair.

Which parameter lies where is a pure function of canonical names and shapes (`plan_units`), so that all ranks agree
without asking, and a dry run can count bytes on a meta device.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.distributed.placements import Placement
from megatron.core.distributed.sinks import attach_sink
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
        """The parameter's box in a flat buffer of the unit, without padding: a one-dimensional view."""
        return buffer[self.start : self.box_stop]

    def shaped(self, buffer: Tensor) -> Tensor:
        """The whole slot in a flat buffer of the unit, shaped as the parameter."""
        return buffer[self.start : self.stop].view(self.parameter.shape)


@dataclass(frozen=True)
class UnitPlan:
    """The layout of a unit."""

    name: str
    grid: str
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int
    """Elements of each of its buffers: the parameters and what aligns them."""

    @property
    def main_dtype(self) -> torch.dtype:
        """Type of gradients, and of the weights that the optimizer updates: float32, or wider if the model is."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def needs_main_weights(self) -> bool:
        """The model's weights are too narrow to be updated in place."""
        return self.main_dtype != self.dtype


def plan_units(module: nn.Module) -> list[UnitPlan]:
    """The units of a model chunk, in the order of its modules. Parameters that need no gradient are left alone.

    A unit is what shares a name up to its first number (`decoder.layers.3`), else its first word (`embedding`). Within
    a unit decayed parameters come first, so that weight decay acts on one run.
    """
    members: dict[tuple[str, str, torch.dtype], list[tuple[nn.Parameter, ParameterInfo]]] = {}
    for parameter, info in named_infos(module):
        if parameter.requires_grad:
            members.setdefault((unit_name(info.name), info.grid, parameter.dtype), []).append((parameter, info))
    return [_plan(*key, parameters) for key, parameters in members.items()]


def unit_name(parameter_name: str) -> str:
    """The unit that a parameter belongs to, from its canonical name."""
    numbered = _UP_TO_FIRST_NUMBER.match(parameter_name)
    return numbered[1] if numbered else parameter_name.partition(".")[0]


def named_infos(module: nn.Module) -> Iterable[tuple[nn.Parameter, ParameterInfo]]:
    """Parameters and descriptors of a model, wrapped or not; a name is given to those whose model gave them none."""
    for path, parameter in canonical_names(module):
        info = info_of(parameter)
        if not info.name:
            info = dataclasses.replace(info, name=re.sub(r"^(module\.)+", "", path))
            parameter.info = info  # type: ignore[attr-defined]
        yield parameter, info


def _plan(name: str, grid: str, dtype: torch.dtype, parameters: list[tuple[nn.Parameter, ParameterInfo]]) -> UnitPlan:
    slots, end = [], 0
    for parameter, info in sorted(parameters, key=lambda member: (not member[1].decays, member[1].embedding_or_output)):
        slots.append(Slot(parameter, info, end))
        end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    return UnitPlan(name, grid, dtype, tuple(slots), end)


class Unit:
    """A planned unit with its memory. Making one moves the parameters' values into `param_buffer`."""

    def __init__(self, plan: UnitPlan, placement: Placement = Placement.REPLICATED) -> None:
        assert placement is Placement.REPLICATED, placement
        self.plan = plan
        self.placement = placement
        device = plan.slots[0].parameter.device
        self.param_buffer = torch.zeros(plan.numel, dtype=plan.dtype, device=device)
        for slot in plan.slots:
            view = slot.shaped(self.param_buffer)
            view.copy_(slot.parameter.data)
            slot.parameter.data = view
        self.grad_buffer: Tensor = torch.empty(0, dtype=plan.main_dtype, device=device)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.plan.slots

    @property
    def owned_range(self) -> tuple[int, int]:
        """The flat range whose optimizer state this rank holds and whose update it computes."""
        return 0, self.plan.numel

    def bind_gradients(self, buffer: Tensor, landed: Callable[[nn.Parameter], None]) -> None:
        """Collect gradients in `buffer` ([numel] of the main type), telling `landed` of every contribution."""
        assert buffer.shape == (self.plan.numel,) and buffer.dtype == self.plan.main_dtype
        self.grad_buffer = buffer
        for slot in self.slots:
            attach_sink(slot.parameter, slot.shaped(buffer), landed)

    def __repr__(self) -> str:
        return f"Unit({self.plan.name}, {self.plan.grid}, {self.plan.dtype}, {self.plan.numel} elements)"
