"""What a checkpoint of Megatron-LM holds for a model: each canonical tensor, each optimizer state, and what is left."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from megatron.conversion.megatron_lm.flat_buffers import find_flat_state, is_flat_state
from megatron.conversion.megatron_lm.mixer_rows import RowOrder, row_orders
from megatron.conversion.megatron_lm.names import KINDS, Found, box_in, location_of
from megatron.conversion.megatron_lm.torch_archive import StoredTensor
from megatron.conversion.megatron_lm.torch_dist import COMMON_OBJECT, DistFolder, DistTensor
from megatron.core.dist_checkpointing.chunk import optimizer_state_name
from megatron.core.dist_checkpointing.planning import describe_names
from megatron.core.exceptions import UserError

_STATE = re.compile(rf"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>{'|'.join(KINDS)})\.(?P<name>.*)")
_GROUPS = re.compile(r".*\.dp_group_idx_\d+\.optimizer/shard_.*")
_DROPPED = re.compile(r"(.*\.)?_extra_state(/.*)?|rng_state(/.*)?|rerun_state_machine_state(/.*)?")


class Source(Protocol):
    """A checkpoint of Megatron-LM in one of its formats."""

    def common(self) -> dict[Any, Any]:
        """Returns everything that is no tensor of the model or of the optimizer, as inert data."""

    def find(self, shapes: Mapping[str, Sequence[int]], with_optimizer: bool) -> Found:
        """Returns the tensors for a model with these canonical shapes. Raises UserError naming what is missing, does
        not fit or is not known."""


class DistSource:
    """A checkpoint in the torch_dist format, with any of the three formats of optimizer state."""

    def __init__(self, folder: DistFolder) -> None:
        self.folder = folder

    def common(self) -> dict[Any, Any]:
        """Returns the folder's common state. Its `optimizer` is a list of all that is said about the optimizer: with
        flat buffers the parameter groups are sharded objects."""
        common = self.folder.common
        said = [self.folder.object(name) for name in sorted(self.folder.objects) if _GROUPS.fullmatch(name)]
        return {**common, "optimizer": [common.get("optimizer"), *said]}

    def find(self, shapes: Mapping[str, Sequence[int]], with_optimizer: bool) -> Found:
        """Returns the tensors, and the optimizer state if it is asked for, from folders of all three formats."""
        found, used = Found(), set()
        tables = self._tables()
        for kind, table in sorted(tables.items()):
            if kind and not with_optimizer:
                continue
            used |= self._find_kind(kind, table, shapes, found)
        flat = {name: tensor for name, tensor in self.folder.tensors.items() if is_flat_state(name)}
        used |= flat.keys()
        if flat and with_optimizer:
            find_flat_state(self.folder, flat, shapes, found)
        everything = {*self.folder.tensors, *self.folder.objects} - {COMMON_OBJECT}
        found.dropped = {name for name in everything if _DROPPED.fullmatch(name)}
        found.dropped |= {name for name in self.folder.objects if is_flat_state(name)}
        if not with_optimizer:
            found.dropped |= {name for name in everything if _STATE.fullmatch(name)}
        unknown = everything - used - found.dropped
        if unknown:
            raise UserError(f"{self.folder.path}: the model of these flags has no {describe_names(unknown)}")
        return found

    def _tables(self) -> dict[str, dict[str, DistTensor]]:
        """Returns the tensors by kind of optimizer state ("" for weights) and name of the weight."""
        tables: dict[str, dict[str, DistTensor]] = {"": {}}
        for name, tensor in self.folder.tensors.items():
            state = _STATE.fullmatch(name)
            if state is not None:
                tables.setdefault(KINDS[state["kind"]], {})[state["name"]] = tensor
            elif not is_flat_state(name):
                tables[""][name] = tensor
        return tables

    def _find_kind(
        self, kind: str, table: Mapping[str, DistTensor], shapes: Mapping[str, Sequence[int]], found: Found
    ) -> set[str]:
        """Adds the tensors of one kind, and returns the names in the folder that they have."""
        theirs = {name: tensor.shape for name, tensor in table.items()}
        used: dict[str, int] = Counter()
        missing = []
        orders = row_orders(shapes)
        for name, shape in shapes.items():
            order = orders.get(name)
            parts = {name: tuple(shape)} if order is None else order.part_shapes(name)
            locations = {part: location_of(part, theirs) for part in parts}
            reads = []
            for part, location in locations.items():
                if location is None:
                    missing.append(part)
                    continue
                tensor = table[location.name]
                reads.append(partial(tensor.read, box_in(location, tensor.shape, part, parts[part])))
                used[tensor.name] += 1 if location.layer is not None else 0
            if len(reads) < len(parts):
                continue
            ours = optimizer_state_name(kind, name) if kind else name
            found.add(ours, tensor.dtype, reads[0] if order is None else partial(_joined, order, reads))
        if missing and not kind:
            raise UserError(f"{self.folder.path} has no {describe_names(missing)}, which the flags of the model need")
        if missing and kind:
            found.notes.append(f"no {kind} is stored for {describe_names(missing, 3)}")
        for name, layers in used.items():
            stored = self.folder.tensors[name].shape
            if layers not in (0, stored[0]):
                raise UserError(
                    f"{self.folder.path}: {name} holds {stored[0]} layers, the model of these flags has {layers}"
                )
        return set(used)


def _joined(order: RowOrder, reads: Sequence[Callable[[], Tensor]]) -> Tensor:
    return order.join([read() for read in reads])


def numbers_called(value: Any, names: Sequence[str], depth: int = 8, seen: set[int] | None = None) -> Iterator[float]:
    """Yields the numbers under one of these keys anywhere in nested dicts and lists. Visits shared objects once."""
    seen = set() if seen is None else seen
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in value.items():
            if key in names and isinstance(item, int | float):
                yield item
            elif key in names and isinstance(item, StoredTensor) and item.numel == 1:
                yield item.read().item()
            else:
                yield from numbers_called(item, names, depth - 1, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers_called(item, names, depth - 1, seen)
