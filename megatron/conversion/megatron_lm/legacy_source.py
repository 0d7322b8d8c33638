"""Megatron-LM's legacy checkpoints (--ckpt-format torch): a file for each model parallel rank, `mp_rank_TT_PPP_EEE`.

A file holds the state dict of its rank, with layers and experts counted from 0 on the rank. Our own model is built for
every rank of the same layout, without memory; its descriptors say which part of each tensor a file has.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.arguments import attributes
from megatron.conversion.megatron_lm.flat_buffers import place_flat_state
from megatron.conversion.megatron_lm.legacy_layout import (
    EXPERTS,
    FILE,
    FLAT_FILE,
    ModelLayout,
    TensorsOf,
    paths_by_place,
)
from megatron.conversion.megatron_lm.legacy_optimizer import (
    KINDS,
    RankParameter,
    concatenated,
    flat_buckets,
    plain_states,
)
from megatron.conversion.megatron_lm.mixer_rows import RowOrder, row_orders
from megatron.conversion.megatron_lm.names import VOCABULARY, Found, SourceTensor, merges_into, spellings
from megatron.conversion.megatron_lm.torch_archive import StoredTensor, TorchArchive
from megatron.conversion.model import RankTensor
from megatron.core.dist_checkpointing.chunk import is_weight, optimizer_state_name
from megatron.core.dist_checkpointing.planning import describe_names
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class _StoredPart:
    """A part of a canonical tensor, or of a state of it, in a file."""

    box: Box
    dtype: torch.dtype
    read: Callable[[], Tensor]


class LegacySource:
    """A checkpoint in the legacy format, with optimizer state of a sharded optimizer or of a plain one."""

    def __init__(self, folder: Path, tensors_of: TensorsOf) -> None:
        self.path = folder
        self._tensors_of = tensors_of
        self._paths = paths_by_place(folder)

    def common(self) -> dict[Any, Any]:
        """Returns what the first file holds beside the model."""
        return {key: value for key, value in self._first.items() if not str(key).startswith("model")}

    @cached_property
    def _first(self) -> dict[Any, Any]:
        return _loaded(next(iter(self._paths.values())) / FILE)

    @cached_property
    def layout(self) -> ModelLayout:
        """The layout, by the names of the folders. Raises UserError if a rank's file is missing."""
        places = self._places()
        tensor, pipeline, expert = (1 + max(place[axis] for place in places) for axis in range(3))
        chunks = max(1, sum(re.fullmatch(r"model\d+", str(key)) is not None for key in self._first))
        layout = ModelLayout(tensor, pipeline, expert, chunks)
        if len(places) != layout.world_size:
            raise UserError(
                f"{self.path}: {len(places)} folders mp_rank_*, but their numbers are those of {tensor} tensor, "
                f"{pipeline} pipeline and {expert} expert parallel ranks; some are missing"
            )
        return layout

    def _places(self) -> dict[tuple[int, int, int], Path]:
        """Folders by tensor, pipeline and expert parallel rank. The second number of a name with two is the pipeline or
        the expert parallel rank."""
        names = {len(key): True for key in self._paths}
        if len(names) > 1:
            raise UserError(f"{self.path}: folders mp_rank_* of different layouts; keep those of one run")
        if 2 in names and not self._second_is_pipeline():
            return {(tensor, 0, expert): path for (tensor, expert), path in self._paths.items()}
        return {(*key, 0, 0)[:3]: path for key, path in self._paths.items()}  # type: ignore[misc]

    def _second_is_pipeline(self) -> bool:
        given = attributes(self._first.get("args")).get("pipeline_model_parallel_size")
        if isinstance(given, int):
            return given > 1
        last = _loaded(self._paths[max(self._paths)] / FILE)  # a later pipeline rank has no embedding of the input
        return _EMBEDDING not in _model_chunks(last)[0]

    def find(self, shapes: Mapping[str, Sequence[int]], with_optimizer: bool) -> Found:
        """Returns the tensors by our names. Raises UserError for those that are missing, do not fit or are unknown."""
        found = Found()
        parts: dict[str, list[_StoredPart]] = {}
        for (tensor, pipeline, expert), path in self._places().items():
            rank = self.layout.rank(tensor, pipeline, expert)
            described = self._tensors_of(self.layout, rank)
            file = _RankFile(path, tensor, described, found)
            for name, part in file.parts(with_optimizer):
                known = parts.setdefault(name, [])
                if all(part.box != other.box for other in known):  # copies on other ranks have the same box
                    known.append(part)
        missing = {name for name in shapes if name not in parts}
        if missing:
            raise UserError(f"{self.path} has no {describe_names(missing)}, which the flags of the model need")
        for name, stored in parts.items():
            shape = tuple(shapes[name.split(".", 2)[2] if name.startswith("optimizer.") else name])
            covered = sum(part.box.numel for part in stored)
            if covered != torch.Size(shape).numel():
                raise UserError(f"{self.path}: its files hold {covered} elements of {name}, which has shape {[*shape]}")
            found.add(name, stored[0].dtype, partial(_joined, shape, stored))
        return found


def _joined(shape: tuple[int, ...], parts: Sequence[_StoredPart]) -> Tensor:
    """Returns the elements of a whole tensor, one-dimensional."""
    if len(parts) == 1:
        return parts[0].read()
    whole = torch.empty(shape, dtype=parts[0].dtype)
    for part in parts:
        place = tuple(slice(start, start + size) for start, size in zip(part.box.start, part.box.shape, strict=True))
        whole[place] = part.read().view(part.box.shape)
    return whole.flatten()


class _RankFile:
    """The files of one rank."""

    def __init__(self, path: Path, tensor_rank: int, described: list[list[RankTensor]], found: Found) -> None:
        self.path = path
        self._tensor_rank = tensor_rank
        self._described = described
        self._found = found
        self._content = _loaded(path / FILE)

    def parts(self, with_optimizer: bool) -> Iterator[tuple[str, _StoredPart]]:
        """Yields the parts of weights by canonical name, and those of optimizer state by its names here."""
        chunks = _model_chunks(self._content)
        if len(chunks) != len(self._described):
            raise UserError(
                f"{self.path / FILE}: {len(chunks)} model chunks; the flags give {len(self._described)} (virtual "
                "pipeline stages)"
            )
        weights: dict[str, tuple[RankTensor, Box, SourceTensor]] = {}
        order: list[tuple[int, int, RankParameter]] = []  # of the parameters in their model
        local = Found()
        shapes: dict[str, tuple[int, ...]] = {}
        orders: dict[str, RowOrder] = {}
        for number, (tensors, state) in enumerate(zip(self._described, chunks, strict=True)):
            used: set[str] = set()
            of_chunk = row_orders({tensor.local_name: tensor.box.shape for tensor in tensors})
            for tensor in tensors:
                names = _stored_names(tensor, state)
                if not names:
                    continue  # missing: the whole checkpoint decides
                used.update(names)
                key = tensor.local_name if len(chunks) == 1 else f"chunk {number}: {tensor.local_name}"
                box, shapes[key], values = self._fitted(tensor, [state[name] for name in names])
                part = shapes[key] if len(names) == 1 else shapes[key][1:]
                for name in names:
                    one = SourceTensor(values.dtype, state[name].read)
                    order.append((number, list(state).index(name), RankParameter(key, tensor, one, part)))
                if tensor.local_name in of_chunk:
                    orders[key] = of_chunk[tensor.local_name]
                    values = _in_our_order(values, orders[key])
                weights[key] = (tensor, box, values)
                local.tensors[key] = values
            left = {name for name in state if name not in used and "_extra_state" not in name}
            if left:
                raise UserError(f"{self.path / FILE}: the model of these flags has no {describe_names(left)}")
            self._found.dropped |= {name for name in state if "_extra_state" in name}
        for key in weights:
            yield weights[key][0].name, _part(*weights[key][1:])
        if with_optimizer:
            for key, kind, values in self._states(local, shapes, weights, order, orders):
                tensor, box, _ = weights[key]
                yield optimizer_state_name(kind, tensor.name), _part(box, values)

    def _fitted(self, tensor: RankTensor, stored: list[StoredTensor]) -> tuple[Box, tuple[int, ...], SourceTensor]:
        """Returns the box of the canonical tensor that is stored, the shape as stored, and all stored elements."""
        box = tensor.box
        inner = box.shape if len(stored) == 1 else box.shape[1:]
        theirs = stored[0].shape
        if tensor.name in VOCABULARY:  # padded by their rule
            begin = self._tensor_rank * theirs[0] if theirs[0] < tensor.global_shape[0] else 0
            rows = max(0, min(theirs[0], tensor.global_shape[0] - begin))
            box = Box((begin, *box.start[1:]), (rows, *box.shape[1:]))
            inner = (theirs[0], *box.shape[1:])
        if any(not merges_into(inner, one.shape) for one in stored):
            raise UserError(
                f"{self.path / FILE}: {tensor.name} has shape {[*inner]} on this rank by the flags of the model, but "
                f"shape {[*theirs]} in the file"
            )
        shape = inner if len(stored) == 1 else (len(stored), *inner)
        return box, shape, SourceTensor(stored[0].dtype, partial(concatenated, stored))

    def _states(
        self,
        local: Found,
        shapes: Mapping[str, tuple[int, ...]],
        weights: Mapping[str, tuple[RankTensor, Box, SourceTensor]],
        order: Sequence[tuple[int, int, RankParameter]],
        orders: Mapping[str, RowOrder],
    ) -> Iterator[tuple[str, str, SourceTensor]]:
        """Yields the optimizer state of the rank: name of the weight in `local`, kind, and all elements."""
        if (self.path / FLAT_FILE).exists():
            parameters = {key: shape for key, shape in shapes.items() if _is_trained(weights[key][0].name)}
            states = Found()
            states.tensors = dict(local.tensors)
            place_flat_state(flat_buckets(self.path / FLAT_FILE), parameters, states, str(self.path / FLAT_FILE))
            self._found.notes += states.notes
            for key in parameters:
                for kind in KINDS:
                    if (name := optimizer_state_name(kind, key)) in states.tensors:
                        yield key, kind, states.tensors[name]
            return
        ordered = [parameter for _, _, parameter in sorted(order, key=lambda item: item[:2])]
        trained = [parameter for parameter in ordered if _is_trained(parameter.tensor.name)]
        for key, kind, values in plain_states(self._content.get("optimizer"), trained, self.path / FILE):
            yield key, kind, _in_our_order(values, orders[key]) if key in orders else values


def _in_our_order(values: SourceTensor, order: RowOrder) -> SourceTensor:
    return SourceTensor(values.dtype, lambda: order.from_module(values.read()))


def _is_trained(name: str) -> bool:
    """Whether the optimizer updates a canonical tensor. In Megatron-LM a router's biases that balance experts are not
    parameters."""
    return is_weight(name) and not name.endswith("expert_bias")


def _stored_names(tensor: RankTensor, state: Mapping[str, StoredTensor]) -> list[str]:
    """Returns the names of a state dict that hold one of our tensors: one name, one for each expert, or none."""
    for name in spellings(tensor.local_name):
        if name in state:
            return [name]
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


def _part(box: Box, values: SourceTensor) -> _StoredPart:
    """Returns a part whose stored elements begin with those of the box; rows that pad a vocabulary follow."""
    return _StoredPart(box, values.dtype, lambda: values.read()[: box.numel])


def _loaded(path: Path) -> dict[Any, Any]:
    content = TorchArchive(path).load()
    if not isinstance(content, dict):
        raise UserError(f"{path}: contains a {type(content).__name__}, not a dict")
    return content


def _model_chunks(content: Mapping[Any, Any]) -> list[dict[str, StoredTensor]]:
    """Returns the state dicts of the model chunks of a rank, without entries that hold nothing."""
    names = ["model"] if "model" in content else []
    names = names or [f"model{number}" for number in range(len(content)) if f"model{number}" in content]
    chunks = []
    for name in names:
        state = content[name]
        if not isinstance(state, dict):
            raise UserError(f"{name} is a {type(state).__name__}, not a state dict")
        chunks.append(
            {
                str(key).removeprefix("module."): value
                for key, value in state.items()
                if isinstance(value, StoredTensor) or "_extra_state" in str(key)
            }
        )
    return chunks
