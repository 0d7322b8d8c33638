"""How the optimizer stores its numbers: in float32, or in the 8 or 16 bits that --use-precision-aware-optimizer allows.

Every number is computed in the main type (float32; float64 in the parity mode) and rounded when it is stored. Scales
belong to blocks of 64 neighbouring elements. Parameters and shards begin at multiples of 64 elements of their unit, so
blocks do not depend on how data parallel ranks shard the state, only on which box of a tensor a rank holds.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.distributed.units import ALIGNMENT, ParameterSlot, UnitPlan
from megatron.core.optimizer.muon_matrices import MOMENTUM, takes_muon
from megatron.core.optimizer.optimizer_config import OptimizerConfig

SCALE_BLOCK = ALIGNMENT
"""Neighbouring elements with one scale."""

STORED_AS = {torch.uint8: torch.float8_e4m3fn}
"""The type behind the word fp8 of --exp-avg-dtype."""

_ROOTS = ("exp_avg_sq",)
"""Moments whose square root is stored, if they have scales: it needs half the exponents."""


class StateTensor(Protocol):
    """A flat tensor of a shard, in the form in which the optimizer keeps it."""

    @property
    def main(self) -> torch.dtype:
        """The main type."""

    def decode(self) -> Tensor:
        """Returns the numbers in the main type: the memory itself if it has this type, else a copy."""

    def encode(self, values: Tensor, skip: Tensor | None = None) -> None:
        """Stores numbers of the main type, rounded, unless `skip`, a bool scalar on the device, is set."""

    def part(self, start: int, stop: int) -> "StateTensor":
        """Returns the elements [start, stop) in the same memory. `start` is a multiple of SCALE_BLOCK."""

    @property
    def movable(self) -> tuple[Tensor, ...]:
        """The tensors that may be in host memory: not the model's weights."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> "StateTensor":
        """Returns the state with each tensor of `movable`, in order, replaced by `move(tensor)`."""


@dataclass(frozen=True)
class _Stored:
    """The part of `StateTensor` that all forms share."""

    _MOVABLE: ClassVar[tuple[str, ...]]
    """Names of the fields with tensors that may be in host memory."""

    @property
    def movable(self) -> tuple[Tensor, ...]:
        """The tensors that may be in host memory."""
        return tuple(getattr(self, name) for name in self._MOVABLE)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Returns the state with each tensor of `movable`, in order, replaced by `move(tensor)`."""
        return dataclasses.replace(self, **{name: move(getattr(self, name)) for name in self._MOVABLE})


@dataclass(frozen=True)
class Plain(_Stored):
    """Numbers in one tensor, in the main type or rounded to a narrower type."""

    _MOVABLE = ("tensor",)
    tensor: Tensor
    main: torch.dtype

    def decode(self) -> Tensor:
        """Returns the numbers in the main type: the tensor itself if it has this type, else a copy."""
        return self.tensor.to(self.main)

    def encode(self, values: Tensor, skip: Tensor | None = None) -> None:
        """Stores numbers of the main type, rounded, unless `skip` is set. Does nothing if `values` is the stored tensor
        itself."""
        if values.data_ptr() != self.tensor.data_ptr():
            store(self.tensor, values.to(self.tensor.dtype), skip)

    def part(self, start: int, stop: int) -> "Plain":
        """Returns the elements [start, stop) in the same memory."""
        return Plain(self.tensor[start:stop], self.main)


@dataclass(frozen=True)
class Scaled(_Stored):
    """Numbers in float16 or fp8, times a scale for each block.

    Scales are powers of two, so that storing a number that was read changes nothing. With `is_root` the square root of
    a number that is not negative is stored; a root that would round to 0 is stored as the smallest positive number,
    because the second moment is a divisor.
    """

    _MOVABLE = ("codes", "scales")
    codes: Tensor
    scales: Tensor
    """float32 [blocks]"""
    main: torch.dtype
    is_root: bool = False

    def decode(self) -> Tensor:
        """Returns the numbers in the main type."""
        values = self.codes.to(self.main) * self._each(self.scales)
        return values.square() if self.is_root else values

    def encode(self, values: Tensor, skip: Tensor | None = None) -> None:
        """Computes a scale for each block and stores the rounded codes and the scales, unless `skip` is set."""
        values = values.sqrt() if self.is_root else values
        padded = F.pad(values.abs(), (0, -values.numel() % SCALE_BLOCK))
        scales = power_of_two_scales(padded.view(-1, SCALE_BLOCK).amax(1).float(), self.codes.dtype)
        codes = values / self._each(scales)
        if self.is_root:
            codes = torch.where(values > 0, codes.clamp(min=smallest(self.codes.dtype)), codes)
        store(self.codes, codes.to(self.codes.dtype), skip)
        store(self.scales, scales, skip)

    def part(self, start: int, stop: int) -> "Scaled":
        """Returns the elements [start, stop) in the same memory. `start` is a multiple of SCALE_BLOCK."""
        assert start % SCALE_BLOCK == 0, start
        blocks = slice(start // SCALE_BLOCK, -(-stop // SCALE_BLOCK))
        return Scaled(self.codes[start:stop], self.scales[blocks], self.main, self.is_root)

    def _each(self, scales: Tensor) -> Tensor:
        """Returns the scale of each element."""
        return scales.to(self.main).repeat_interleave(SCALE_BLOCK)[: self.codes.numel()]


@dataclass(frozen=True)
class WithRemainder(_Stored):
    """Float32 weights as the model's bfloat16 weights and the 16 bits that these lack, without any loss.

    The bfloat16 weight is the nearest one; if two are equally near, the one away from zero. With the usual choice of
    the even one, 16 bits could not encode on which side the float32 weight is. A NaN becomes the default NaN.
    """

    _MOVABLE = ("remainder",)
    model_weights: Tensor
    """bfloat16: the weights that the model computes with."""
    remainder: Tensor
    """int16: the difference to add to the bits of the bfloat16 weight followed by 16 zeros."""

    @property
    def main(self) -> torch.dtype:
        """float32."""
        return torch.float32

    def decode(self) -> Tensor:
        """Returns the float32 weights."""
        remainder = self.remainder.to(self.model_weights.device)
        bits = (self.model_weights.view(torch.int16).to(torch.int32) << 16) + remainder
        return bits.view(torch.float32)

    def encode(self, values: Tensor, skip: Tensor | None = None) -> None:
        """Stores float32 weights in two parts, unless `skip` is set."""
        rounded, remainder = split_float32(values)
        store(self.model_weights, rounded, skip)
        store(self.remainder, remainder, skip)

    def part(self, start: int, stop: int) -> "WithRemainder":
        """Returns the elements [start, stop) in the same memory."""
        return WithRemainder(self.model_weights[start:stop], self.remainder[start:stop])


def split_float32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bfloat16 weights and the int16 remainders of float32 numbers; see `WithRemainder`."""
    bits = values.contiguous().view(torch.int32)
    is_nan = values.isnan()
    rounded = torch.where(is_nan, 0x7FC0, (bits + 0x8000) >> 16).to(torch.int16)
    remainder = torch.where(is_nan, 0, bits).to(torch.int16)
    return rounded.view(torch.bfloat16), remainder


def power_of_two_scales(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the smallest powers of two (float32) that bring these largest absolute values into the range of a type.
    If a value is not finite, its whole block is stored as NaN or infinity."""
    bits = (amax / torch.full_like(amax, torch.finfo(dtype).max)).view(torch.int32)
    above = ((bits & 0x007FFFFF) != 0).to(torch.int32)
    return ((bits & 0x7F800000) + above * 0x00800000).clamp(min=0x00800000).view(torch.float32)


def smallest(dtype: torch.dtype) -> float:
    """Returns the smallest positive number of a type, subnormal numbers included."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def store(old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Copies `new` into `old`, or changes nothing if `skip` is set. Without `skip` they may be on different devices."""
    if skip is None:
        old.copy_(new)
    else:
        width = {1: torch.uint8, 2: torch.int16}.get(old.element_size(), old.dtype)  # torch.where knows no fp8
        old.view(width).copy_(torch.where(skip, old.view(width), new.view(width)))


# ---------------------------------------------------------------------------------------------------------------------
# Types of stored numbers


def moment_dtype(config: OptimizerConfig, name: str) -> torch.dtype | None:
    """Returns the type of a moment; None for the main type."""
    chosen = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}.get(name, torch.float32)
    if not config.use_precision_aware_optimizer or chosen is torch.float32:
        return None
    return STORED_AS.get(chosen, chosen)


def keeps_remainder(config: OptimizerConfig, plan: UnitPlan) -> bool:
    """Whether the main weights of a unit are kept as remainders beside the model's weights."""
    return (
        config.use_precision_aware_optimizer
        and config.store_param_remainders
        and config.main_params_dtype is torch.float32
        and plan.dtype is torch.bfloat16
    )


def new_moment(name: str, numel: int, config: OptimizerConfig, main: torch.dtype, device: torch.device) -> StateTensor:
    """Returns a moment of zeros."""
    return _zeros(numel, moment_dtype(config, name) or main, main, device, name in _ROOTS)


def new_weights(plan: UnitPlan, model_weights: Tensor, config: OptimizerConfig) -> StateTensor:
    """Returns the main weights of a shard, with the values of the model's weights."""
    if not plan.needs_main_weights:
        return Plain(model_weights, plan.main_dtype)
    if keeps_remainder(config, plan):
        return WithRemainder(model_weights, torch.zeros_like(model_weights, dtype=torch.int16))
    narrow = config.use_precision_aware_optimizer and config.main_params_dtype is not torch.float32
    dtype = config.main_params_dtype if narrow else plan.main_dtype
    made = _zeros(model_weights.numel(), dtype, plan.main_dtype, model_weights.device, is_root=False)
    made.encode(model_weights.to(plan.main_dtype))
    return made


def rounds_to_model_weights(plan: UnitPlan, config: OptimizerConfig, is_offloaded: bool) -> bool:
    """Whether a shard's main weights are plain numbers on the device that torch rounds to the model's weights. Then the
    model's weights of a shard need no memory, if layers do not read them."""
    return plan.needs_main_weights and not config.use_precision_aware_optimizer and not is_offloaded


def _zeros(numel: int, dtype: torch.dtype, main: torch.dtype, device: torch.device, is_root: bool) -> StateTensor:
    codes = torch.zeros(numel, dtype=dtype, device=device)
    if dtype not in (torch.float16, torch.float8_e4m3fn):
        return Plain(codes, main)
    scales = torch.ones(-(-numel // SCALE_BLOCK), dtype=torch.float32, device=device)
    return Scaled(codes, scales, main, is_root)


def moment_names(slot: ParameterSlot, moments: tuple[str, ...], config: OptimizerConfig) -> tuple[str, ...]:
    """Returns the names of a parameter's moments: Muon's, or `moments`, the moments of the rule for all other
    parameters."""
    return (MOMENTUM,) if takes_muon(slot.parameter, slot.info, config) else moments


def moment_ranges(
    plan: UnitPlan, shard_range: tuple[int, int], moments: tuple[str, ...], config: OptimizerConfig
) -> dict[str, tuple[int, int]]:
    """Returns for each moment the elements [start, stop) of a shard, from the first to the last parameter with this
    moment."""
    first, end = shard_range
    found: dict[str, tuple[int, int]] = {}
    stops = [*(slot.start for slot in plan.slots[1:]), plan.numel]
    for slot, stop in zip(plan.slots, stops, strict=True):
        start, stop = max(slot.start, first) - first, min(stop, end) - first
        for name in moment_names(slot, moments, config) if start < stop else ():
            found[name] = (min(start, found.get(name, (start, stop))[0]), stop)
    return found


def planned_states(
    plan: UnitPlan, shard_range: tuple[int, int], moments: tuple[str, ...], config: OptimizerConfig
) -> list[StateTensor]:
    """Returns the state of a unit's shard on the meta device: the moments, and main weights if there are any."""
    numel, meta = shard_range[1] - shard_range[0], torch.device("meta")
    ranges = moment_ranges(plan, shard_range, moments, config)
    kept = [new_moment(name, stop - start, config, plan.main_dtype, meta) for name, (start, stop) in ranges.items()]
    if plan.needs_main_weights:
        kept.append(new_weights(plan, torch.empty(numel, dtype=plan.dtype, device=meta), config))
    return kept


def state_bytes(plan: UnitPlan, shard_range: tuple[int, int], moments: tuple[str, ...], config: OptimizerConfig) -> int:
    """Returns the bytes of the state of a unit's shard, model weights not counted."""
    numel, meta = shard_range[1] - shard_range[0], torch.device("meta")
    memory = [tensor for state in planned_states(plan, shard_range, moments, config) for tensor in state.movable]
    if config.ema_decay is not None:
        memory.append(torch.empty(numel, dtype=plan.main_dtype, device=meta))
    return sum(tensor.nbytes for tensor in memory)
