"""The published functions that save a state dict with sharded tensors into a folder, and load it under any layout.

The files are those of every checkpoint here (docs/checkpoints.md): safetensors and JSON, written aside, synced and
renamed, so that the folder is whole or not there.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.checkpoint import open_checkpoint
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.common_state import (
    LEFT_OUT,
    decode,
    encode,
    leaves,
    merged,
    tensor_chunks,
    tensors_of,
    text_of,
)
from megatron.core.dist_checkpointing.geometry import intersect
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.ranks import Ranks
from megatron.core.dist_checkpointing.reading import load_folder
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag
from megatron.core.dist_checkpointing.writing import save_folder
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

StateDict = dict[str, Any]


def save(
    sharded_state_dict: StateDict,
    checkpoint_dir: str,
    sharded_strategy: tuple[str, int] | None = None,
    common_strategy: tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
) -> None:
    """Save a state dict: every rank calls it with its own parts (`ShardedTensor`) and the values that all share.

    `checkpoint_dir` must be empty or not there. Shared values are None, numbers, strings, types, tensors, and dicts,
    lists and tuples of them; they must be equal on all ranks (after `preprocess_common_before_consistancy_check`, which
    may leave out what differs), and the first rank's are saved. That the parts cover every tensor once is always
    checked, and the format is always ours: a named strategy changes nothing, which is said.

    Raises UserError on every rank when any fails; nothing is left then.
    """
    if async_sharded_save:
        raise UserError("dist_checkpointing.save(async_sharded_save=True): not yet; leave it out")
    ranks = Ranks()
    _say_of_strategies(ranks, sharded_strategy, common_strategy)
    tensors: dict[str, Tensor] = {}
    common = ranks.together(lambda: encode(sharded_state_dict, tensors))
    checked = common
    if preprocess_common_before_consistancy_check is not None:
        plain = decode(common, tensors)
        checked = ranks.together(lambda: encode(preprocess_common_before_consistancy_check(plain), {}))
    _check_agreement(ranks, checked)
    chunks = ranks.together(lambda: _chunks_to_save(sharded_state_dict))
    if ranks.rank == 0:
        chunks += tensor_chunks(tensors)
    contents = {"state_dict": common, "content_metadata": encode(content_metadata, {})}
    save_folder(Path(checkpoint_dir), chunks, common=contents, layout={})


def load(
    sharded_state_dict: StateDict,
    checkpoint_dir: str,
    sharded_strategy: tuple[str, int] | None = None,
    common_strategy: tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """The state dict that was saved, with this rank's parts as the sharded tensors here say, and all shared values.

    A sharded tensor is filled in place where it has `data` (for a module's sharded state dict, the live parameters),
    and stands in the result as a tensor; one without data is made on the CPU. Objects that were not saved
    (`LocalNonpersistentObject`) are taken from here. `strict` says what happens to keys of one side only; with
    return_unexpected and return_all the result is (state dict, missing keys, unexpected keys).

    Raises UserError on every rank when any fails: a folder that is not there or broken, of another program, or with
    other shapes. Tensors may then be half read.
    """
    ranks, handling, folder = Ranks(), parse_strict_flag(strict), Path(checkpoint_dir)
    _say_of_strategies(ranks, sharded_strategy, common_strategy)
    manifest = ranks.together(lambda: _open(folder))
    common = manifest.common.get("state_dict", manifest.common)
    tensors = tensors_of(common)
    wanted = ranks.together(lambda: _Wanted(sharded_state_dict, folder))
    chunks = [*wanted.chunks, *tensor_chunks(tensors)]
    quiet = ranks.rank != 0 or handling is StrictHandling.IGNORE_ALL
    loaded = load_folder(folder, chunks, tolerance=handling.tolerance, say=(lambda text: None) if quiet else print)
    state = merged(sharded_state_dict, decode(common, tensors), lambda place: wanted.value(place, loaded.missing))
    if not handling.returns:
        return state
    missing = loaded.unused if handling is StrictHandling.RETURN_ALL else ()
    return state, set(missing), set(loaded.missing)


def load_common_state_dict(checkpoint_dir: str | Path) -> StateDict:
    """What a checkpoint holds beside sharded tensors. One process may ask alone, or every rank."""
    folder = Path(checkpoint_dir)
    manifest = Ranks().together(lambda: _open(folder))
    common = manifest.common.get("state_dict", manifest.common)
    tensors = tensors_of(common)
    everything = StrictHandling.IGNORE_ALL.tolerance
    load_folder(folder, tensor_chunks(tensors), tolerance=everything, say=lambda text: None)
    return decode(common, tensors)


def load_content_metadata(checkpoint_dir: str | Path) -> dict[str, Any] | None:
    """The `content_metadata` of a save."""
    return decode(Ranks().together(lambda: _open(Path(checkpoint_dir))).common.get("content_metadata"), {})


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def _say_of_strategies(ranks: Ranks, *strategies: Any) -> None:
    for strategy in strategies:
        if strategy is None:
            continue
        if not isinstance(strategy, tuple):
            raise UserError(
                f"dist_checkpointing: a {type(strategy).__name__} as a strategy: there is one format and one way to "
                "write it; leave the strategy out"
            )
        if ranks.rank == 0:
            print(f"dist_checkpointing: strategy {strategy}: checkpoints are written in our own format (safetensors)")


def _check_agreement(ranks: Ranks, common: Any) -> None:
    """Raises UserError naming the keys under which ranks have different shared values."""
    digests = {
        str(key): hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for key, value in (common.items() if isinstance(common, Mapping) else [("the state dict", common)])
    }
    everyone = ranks.gather(digests)
    names = {
        name for other in everyone for name in other.keys() | digests.keys() if other.get(name) != digests.get(name)
    }
    differing = {name for other in ranks.gather(sorted(names)) for name in other}
    if differing:
        raise UserError(
            f"dist_checkpointing.save: not the same on all ranks: {', '.join(sorted(differing))}; give ShardedTensors, "
            "wrap what belongs to one rank in LocalNonpersistentObject, or leave it out of the comparison by "
            "preprocess_common_before_consistancy_check"
        )


def _chunks_to_save(state: StateDict) -> list[Chunk]:
    chunks = []
    for path, part in leaves(state, (ShardedTensor,)):
        part.validate_metadata_integrity()
        if part.data is None:
            raise UserError(f"{text_of(path)} (key {part.key}) has no data to save")
        if part.holders or part.is_main_replica:
            chunks.append(part.chunk(part.data.detach().contiguous(), part.holders))
    return chunks


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def _open(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder to load from")
    if folders.is_foreign(folder):
        raise UserError(
            f"{folder} holds another program's checkpoint (torch .pt or .distcp files); this program reads folders "
            "with rank_NNNNN.safetensors files and a manifest.json"
        )
    return read_manifest(folder)


class _Wanted:
    """The sharded tensors of a request, the chunks that fill them, and what is made of these afterwards."""

    def __init__(self, state: StateDict, folder: Path) -> None:
        self.chunks: list[Chunk] = []
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of a sharded tensor: where the values are, and a view of its data where they belong."""
        parts = [part for _, part in leaves(state, (ShardedTensor,))]
        shapes = _stored_shapes(folder) if any(part.allow_shape_mismatch for part in parts) else {}
        for part in parts:
            part.init_data("cpu")
            self._add(part, shapes.get(part.key, tuple(part.global_shape)))

    def _add(self, part: ShardedTensor, stored_shape: tuple[int, ...]) -> None:
        assert part.data is not None
        data, whole = part.data.detach(), tuple(part.global_shape)
        if part.allow_shape_mismatch and stored_shape != whole:
            self._add_common_part(part, data, stored_shape)
            return
        target = data if data.is_contiguous() else data.new_empty(data.shape)
        if target is not data:
            self.copies[id(part)] = (target, data)
        if data.numel():  # a rank may hold nothing of a tensor, such as of a small vocabulary
            self.chunks.append(part.chunk(target))

    def _add_common_part(self, part: ShardedTensor, data: Tensor, stored_shape: tuple[int, ...]) -> None:
        """Of a tensor that is stored in another size: what both sizes have. The rest of `data` stays as it is."""
        if part.flattened_range is not None or len(stored_shape) != len(part.global_shape):
            raise UserError(
                f"{part.key} is stored with shape {list(stored_shape)}, which allow_shape_mismatch cannot bring to "
                f"{list(part.global_shape)}" + (" for a flattened range" if part.flattened_range is not None else "")
            )
        box = part.chunk(data.contiguous()).box
        shared = intersect(box, Box.whole(stored_shape))
        if shared is None:  # nothing in common
            return
        target = data.new_empty(shared.shape)
        inside = data.view(box.shape)
        for dim, (first, begin, extent) in enumerate(zip(shared.start, box.start, shared.shape, strict=True)):
            inside = inside.narrow(dim, first - begin, extent)
        self.copies[id(part)] = (target, inside)
        self.chunks.append(Chunk(part.key, stored_shape, shared, None, target))

    def value(self, place: ShardedTensor | LocalNonpersistentObject, missing: frozenset[str]) -> Any:
        """What stands in the loaded state dict where `place` stood in the request."""
        if isinstance(place, LocalNonpersistentObject):
            return place.unwrap()
        if place.key in missing:
            return LEFT_OUT
        if id(place) in self.copies:
            values, target = self.copies[id(place)]
            target.copy_(values)
        return place.data if place.stored is None else place.stored


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: stored[0].chunk.global_shape for name, stored in open_checkpoint(folder).catalogue.items()}
