"""The state dict of a module of Megatron-LM: which of our tensors each entry is, or is a part of."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.legacy_layout import EXPERTS
from megatron.conversion.megatron_lm.mixer_rows import RowOrder, row_orders
from megatron.conversion.megatron_lm.names import VOCABULARY, Found, SourceTensor, merges_into, spellings
from megatron.conversion.model import RankTensor
from megatron.core.dist_checkpointing.planning import describe_names
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box


@runtime_checkable
class StateTensor(Protocol):
    """A tensor in a state dict."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""

    def read(self) -> Tensor:
        """Returns its elements."""


@dataclass(frozen=True)
class FittedTensor:
    """One of our tensors on a rank, and where a state dict has it."""

    tensor: RankTensor
    names: list[str]
    """Its names there: one, or one for each expert."""
    box: Box
    """The part of the canonical tensor that is stored."""
    shape: tuple[int, ...]
    """Shape of what is stored, in our dimensions."""
    values: SourceTensor
    """All stored elements, in our order."""
    order: RowOrder | None
    """Their order of rows, if it is not ours."""


@dataclass(frozen=True)
class StoredPart:
    """A part of a canonical tensor, or of a state of it. Rows that pad a vocabulary may follow its elements."""

    box: Box
    values: SourceTensor


def add_parts(
    found: Found, parts: Iterable[tuple[str, StoredPart]], shapes: Mapping[str, Sequence[int]], place: Path
) -> None:
    """Joins parts by their canonical names and adds the tensors. Raises UserError if one of `shapes` is missing, or
    if the parts of a tensor are not all of it."""
    by_name: dict[str, dict[Box, StoredPart]] = {}
    for name, part in parts:
        by_name.setdefault(name, {}).setdefault(part.box, part)  # copies on other ranks have the same box
    missing = {name for name in shapes if name not in by_name}
    if missing:
        raise UserError(f"{place} has no {describe_names(missing)}, which the flags of the model need")
    for name, boxes in by_name.items():
        shape = tuple(shapes[name.split(".", 2)[2] if name.startswith("optimizer.") else name])
        covered = sum(box.numel for box in boxes)
        if covered != math.prod(shape):
            raise UserError(f"{place}: its files hold {covered} elements of {name}, which has shape {[*shape]}")
        stored = [*boxes.values()]
        found.add(name, stored[0].values.dtype, partial(_whole, shape, stored))


def _whole(shape: tuple[int, ...], parts: Sequence[StoredPart]) -> Tensor:
    """Returns the elements of a whole tensor, one-dimensional."""
    if len(parts) == 1:
        return parts[0].values.read()[: parts[0].box.numel]
    whole = torch.empty(shape, dtype=parts[0].values.dtype)
    for part in parts:
        whole[part.box.slices] = part.values.read()[: part.box.numel].view(part.box.shape)
    return whole.flatten()


def fit_state_dict(
    tensors: Sequence[RankTensor], state: Mapping[str, StateTensor], tensor_rank: int, place: Path
) -> Iterator[FittedTensor]:
    """Yields those of the tensors of a model chunk that a state dict has. Raises UserError for other shapes, and for
    entries that are no tensor of the chunk. Errors name `place`."""
    used: set[str] = set()
    orders = row_orders({tensor.local_name: tensor.box.shape for tensor in tensors})
    for tensor in tensors:
        names = _stored_names(tensor, state)
        if not names:
            continue  # missing: the whole checkpoint decides
        used.update(names)
        box, shape, values = _fitted(tensor, [state[name] for name in names], tensor_rank, place)
        order = orders.get(tensor.local_name)
        values = values if order is None else in_our_order(values, order)
        yield FittedTensor(tensor, names, box, shape, values, order)
    left = {name for name in state if name not in used and "_extra_state" not in name}
    if left:
        raise UserError(f"{place}: the model of these flags has no {describe_names(left)}")


def in_our_order(values: SourceTensor, order: RowOrder) -> SourceTensor:
    """Returns a tensor of a module of Megatron-LM with its rows in our order."""
    return SourceTensor(values.dtype, lambda: order.from_module(values.read()))


def _fitted(
    tensor: RankTensor, stored: list[StateTensor], tensor_rank: int, place: Path
) -> tuple[Box, tuple[int, ...], SourceTensor]:
    """Returns the box of the canonical tensor that is stored, the shape as stored, and all stored elements."""
    box = tensor.box
    inner = box.shape if len(stored) == 1 else box.shape[1:]
    theirs = stored[0].shape
    if tensor.name in VOCABULARY:  # padded by their rule
        begin = tensor_rank * theirs[0] if theirs[0] < tensor.global_shape[0] else 0
        rows = max(0, min(theirs[0], tensor.global_shape[0] - begin))
        box = Box((begin, *box.start[1:]), (rows, *box.shape[1:]))
        inner = (theirs[0], *box.shape[1:])
    if any(not merges_into(inner, one.shape) for one in stored):
        raise UserError(
            f"{place}: {tensor.name} has shape {[*inner]} on this rank by the flags of the model, but "
            f"shape {[*theirs]} in the file"
        )
    shape = inner if len(stored) == 1 else (len(stored), *inner)
    return box, shape, SourceTensor(stored[0].dtype, partial(concatenated, stored))


def concatenated(stored: Sequence[StateTensor]) -> Tensor:
    """Returns the elements of several tensors, one after the other."""
    return stored[0].read() if len(stored) == 1 else torch.cat([one.read() for one in stored])


def _stored_names(tensor: RankTensor, state: Mapping[str, StateTensor]) -> list[str]:
    """Returns the names of a state dict that hold one of our tensors: one name, one for each expert, or none."""
    for name in spellings(tensor.local_name):
        if name in state:
            return [name]
        grouped = re.sub(r"\.local_experts\.(\d+)\.(linear_.*)", r".\2\1", name)  # of a module for all experts
        if grouped in state:
            return [grouped]
        if EXPERTS not in name:
            continue
        head, tail = name.split(EXPERTS)
        numbers = range(tensor.box.shape[0])
        for names in (
            [f"{head}.experts.local_experts.{number}.linear_{tail}" for number in numbers],
            [f"{head}{EXPERTS}{tail}{number}" for number in numbers],
        ):
            if all(one in state for one in names):
                return names
    return []
