"""Megatron-LM's legacy checkpoints (--ckpt-format torch): a file for each model parallel rank, `mp_rank_TT_PPP_EEE`.

A file holds the state dict of its rank, with layers and experts counted from 0 on the rank. Our own model is built for
every rank of the same layout, without memory; its descriptors say which part of each tensor a file has.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.conversion.megatron_lm.arguments import attributes
from megatron.conversion.megatron_lm.flat_buffers import place_flat_state
from megatron.conversion.megatron_lm.legacy_layout import FILE, FLAT_FILE, ModelLayout, TensorsOf, paths_by_place
from megatron.conversion.megatron_lm.legacy_optimizer import KINDS, RankParameter, flat_buckets, plain_states
from megatron.conversion.megatron_lm.mixer_rows import RowOrder
from megatron.conversion.megatron_lm.names import Found, SourceTensor
from megatron.conversion.megatron_lm.state_dict import StoredPart, add_parts, fit_state_dict, in_our_order
from megatron.conversion.megatron_lm.torch_archive import StoredTensor, TorchArchive
from megatron.conversion.model import RankTensor
from megatron.core.dist_checkpointing.chunk import is_weight, optimizer_state_name
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

_EMBEDDING = "embedding.word_embeddings.weight"


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
    def _first(self) -> dict[object, object]:
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
        parts: list[tuple[str, StoredPart]] = []
        for (tensor, pipeline, expert), path in self._places().items():
            rank = self.layout.rank(tensor, pipeline, expert)
            file = _RankFile(path, tensor, self._tensors_of(self.layout, rank), found)
            parts += file.parts(with_optimizer)
        add_parts(found, parts, shapes, self.path)
        return found


class _RankFile:
    """The files of one rank."""

    def __init__(self, path: Path, tensor_rank: int, described: list[list[RankTensor]], found: Found) -> None:
        self.path = path
        self._tensor_rank = tensor_rank
        self._described = described
        self._found = found
        self._content = _loaded(path / FILE)

    def parts(self, with_optimizer: bool) -> Iterator[tuple[str, StoredPart]]:
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
            for one in fit_state_dict(tensors, state, self._tensor_rank, self.path / FILE):
                tensor, stored = one.tensor, one.names
                key = tensor.local_name if len(chunks) == 1 else f"chunk {number}: {tensor.local_name}"
                shapes[key] = one.shape
                part = one.shape if len(stored) == 1 else one.shape[1:]
                for name in stored:
                    values = SourceTensor(one.values.dtype, state[name].read)
                    order.append((number, list(state).index(name), RankParameter(key, tensor, values, part)))
                if one.order is not None:
                    orders[key] = one.order
                weights[key] = (tensor, one.box, one.values)
                local.tensors[key] = one.values
            self._found.dropped |= {name for name in state if "_extra_state" in name}
        for key in weights:
            yield weights[key][0].name, StoredPart(*weights[key][1:])
        if with_optimizer:
            for key, kind, values in self._states(local, shapes, weights, order, orders):
                tensor, box, _ = weights[key]
                yield optimizer_state_name(kind, tensor.name), StoredPart(box, values)

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
            yield key, kind, in_our_order(values, orders[key]) if key in orders else values


def _is_trained(name: str) -> bool:
    """Whether the optimizer updates a canonical tensor. In Megatron-LM a router's biases that balance experts are not
    parameters."""
    return is_weight(name) and not name.endswith("expert_bias")


def _loaded(path: Path) -> dict[Any, Any]:
    content = TorchArchive(path).load()
    if not isinstance(content, dict):
        raise UserError(f"{path}: contains a {type(content).__name__}, not a dict")
    return content


def _model_chunks(content: Mapping[object, object]) -> list[dict[str, StoredTensor]]:
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
