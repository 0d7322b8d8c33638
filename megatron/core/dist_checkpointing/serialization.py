"""Megatron-LM's functions that save a state dict with sharded tensors into a folder and load it under any layout.

The files are those of all checkpoints (docs/checkpoints.md): safetensors and JSON, written into a temporary folder,
synced and renamed, so that the folder is complete or does not exist.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
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
    path_text,
    refusing_forgeries,
    tensor_chunks,
    tensors_of,
)
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.geometry import intersect
from megatron.core.dist_checkpointing.manifest import MANIFEST, BrokenCheckpoint, Manifest, read_manifest
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    apply_factories,
    apply_factory_merges,
)
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
    """Saves a state dict. Collective: each rank passes its own parts (`ShardedTensor`) and the values that all share.

    `checkpoint_dir` must be empty or not exist. Shared values are None, numbers, strings, dtypes, tensors, and dicts,
    lists and tuples of these. They must be equal on all ranks, and the first rank's values are saved.
    `preprocess_common_before_consistancy_check` may leave out values from this comparison. Whether the parts cover
    every tensor exactly once is always checked. There is one format: a strategy changes nothing, and a line says so.

    If one rank fails, all ranks raise UserError and nothing is left on disk.
    """
    if async_sharded_save:
        raise UserError("dist_checkpointing.save(async_sharded_save=True): not yet; leave it out")
    ranks = RankCoordinator()
    _log_strategies(ranks, sharded_strategy, common_strategy)
    sharded_state_dict = ranks.run_on_all(lambda: apply_factories(sharded_state_dict))
    tensors: dict[str, Tensor] = {}
    common = ranks.run_on_all(lambda: encode(sharded_state_dict, tensors))
    checked = common
    if preprocess_common_before_consistancy_check is not None:
        plain = decode(common, tensors)
        checked = ranks.run_on_all(lambda: encode(preprocess_common_before_consistancy_check(plain), {}))
    _check_agreement(ranks, checked)
    chunks = ranks.run_on_all(lambda: _chunks_to_save(sharded_state_dict))
    of_objects: dict[str, Tensor] = {}
    objects = _gather_objects(ranks, sharded_state_dict, of_objects)
    chunks += tensor_chunks(of_objects if ranks.rank else {**tensors, **of_objects})
    contents = {"state_dict": common, "content_metadata": encode(content_metadata, {})}
    if objects:
        contents["sharded_objects"] = objects
    save_folder(Path(checkpoint_dir), chunks, common=contents, layout={})


def load(
    sharded_state_dict: StateDict,
    checkpoint_dir: str,
    sharded_strategy: tuple[str, int] | None = None,
    common_strategy: tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Returns the saved state dict, with this rank's parts of sharded tensors and all shared values. Collective.

    `sharded_state_dict` requests the parts. A ShardedTensor with `data` is loaded in place (for a module's sharded
    state dict, into the parameters); for one without, a tensor on the CPU is made. In the result, tensors replace the
    ShardedTensors. Objects that are not saved (`LocalNonpersistentObject`) are taken from the request. `strict` decides
    about keys that only one side contains; with return_unexpected and return_all the result is (state dict, missing
    keys, unexpected keys).

    If one rank fails, all ranks raise UserError: the folder does not exist, is broken or of another program, or shapes
    differ. Some tensors may then have been overwritten.
    """
    ranks, handling, folder = RankCoordinator(), parse_strict_flag(strict), Path(checkpoint_dir)
    _log_strategies(ranks, sharded_strategy, common_strategy)
    manifest = ranks.run_on_all(lambda: _open(folder))
    common = manifest.common.get("state_dict", manifest.common)
    requested = ranks.run_on_all(lambda: apply_factories(sharded_state_dict))
    objects = manifest.common.get("sharded_objects", {})
    if not isinstance(objects, dict):
        raise BrokenCheckpoint(folder / MANIFEST, "common.sharded_objects is not an object")
    wanted = {part.unique_key for _, part in leaves(requested, (ShardedObject,))}
    with refusing_forgeries(folder / MANIFEST):
        tensors = tensors_of([common, [objects[key] for key in sorted(wanted & objects.keys())]])
    request = ranks.run_on_all(lambda: _LoadRequest(requested, folder))
    chunks = [*request.chunks, *tensor_chunks(tensors)]
    quiet = ranks.rank != 0 or handling is StrictHandling.IGNORE_ALL
    loaded = load_folder(folder, chunks, policy=handling.policy, log=(lambda text: None) if quiet else print)
    if tensors.keys() & loaded.missing:
        raise BrokenCheckpoint(folder / MANIFEST, f"{min(tensors.keys() & loaded.missing)} is in no file")

    def value_of(part: Any) -> object:
        if isinstance(part, ShardedObject):
            return decode(objects[part.unique_key], tensors) if part.unique_key in objects else LEFT_OUT
        return request.value(part, loaded.missing)

    with refusing_forgeries(folder / MANIFEST):
        decoded = decode(common, tensors)
    state = merged(requested, decoded, value_of)
    state = apply_factory_merges(state, sharded_state_dict)
    lost = wanted - objects.keys()
    if lost and not handling.policy.missing:
        raise UserError(f"{folder} has no {', '.join(sorted(lost))}")
    if not handling.returns:
        return state
    missing = loaded.unused if handling is StrictHandling.RETURN_ALL else ()
    return state, set(missing), set(loaded.missing) | lost


def load_common_state_dict(checkpoint_dir: str | Path) -> StateDict:
    """Returns the saved state dict without sharded tensors. A single process may call it, or all ranks together."""
    folder = Path(checkpoint_dir)
    manifest = RankCoordinator().run_on_all(lambda: _open(folder))
    common = manifest.common.get("state_dict", manifest.common)
    with refusing_forgeries(folder / MANIFEST):
        tensors = tensors_of(common)
        load_folder(
            folder, tensor_chunks(tensors), policy=StrictHandling.ASSUME_OK_UNEXPECTED.policy, log=lambda text: None
        )
        return decode(common, tensors)


def load_content_metadata(checkpoint_dir: str | Path) -> dict[str, Any] | None:
    """Returns the `content_metadata` of a saved checkpoint; None if it has none. A single process may call it, or all
    ranks together."""
    folder = Path(checkpoint_dir)
    common = RankCoordinator().run_on_all(lambda: _open(folder)).common
    with refusing_forgeries(folder / MANIFEST):
        return decode(common.get("content_metadata"), {})


def load_plain_tensors(checkpoint_dir: str | Path) -> dict[str, Tensor]:
    """Returns all sharded tensors of a checkpoint by key, whole and on the CPU. A single process may call it, or all
    ranks together; each gets all tensors."""
    folder = Path(checkpoint_dir)
    manifest = RankCoordinator().run_on_all(lambda: _open(folder))
    with refusing_forgeries(folder / MANIFEST):
        parts = [manifest.common.get("state_dict", manifest.common), manifest.common.get("sharded_objects")]
        shared = tensors_of(parts)
    found = {}
    for name, stored in open_checkpoint(folder).catalogue.items():
        if name not in shared:
            found[name] = torch.empty(stored[0].chunk.global_shape, dtype=stored[0].chunk.dtype)
    load_folder(folder, tensor_chunks(found), policy=StrictHandling.IGNORE_ALL.policy, log=lambda text: None)
    return found


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Raises UserError: a saved folder is never changed."""
    raise UserError(
        f"remove_sharded_tensors({str(checkpoint_dir)!r}, {key_prefix!r}): a checkpoint's files have checksums and "
        "are never changed; load the tensors to keep and save them into another folder"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def _gather_objects(ranks: RankCoordinator, state: StateDict, tensors: dict[str, Tensor]) -> dict[str, object]:
    """Returns the sharded objects of all ranks as JSON, by unique key. Adds the tensors of this rank's objects to
    `tensors`. Raises UserError if two ranks write the same object."""

    def encoded() -> dict[str, object]:
        own = [part for _, part in leaves(state, (ShardedObject,)) if part.is_main_replica]
        return {part.unique_key: encode(part.data, tensors, (part.unique_key,)) for part in own}

    found: dict[str, Any] = {}
    for of_rank in ranks.gather(ranks.run_on_all(encoded)):
        twice = sorted(found.keys() & of_rank.keys())
        if twice:
            raise UserError(f"two ranks write {twice[0]}; give the copies a replica_id other than 0")
        found |= of_rank
    return found


def _log_strategies(ranks: RankCoordinator, *strategies: object) -> None:
    for strategy in strategies:
        if strategy is None:
            continue
        if not isinstance(strategy, tuple):
            raise UserError(
                f"dist_checkpointing: a {type(strategy).__name__} as strategy is not supported; there is one format, "
                "leave the strategy out"
            )
        if ranks.rank == 0:
            print(f"dist_checkpointing: strategy {strategy}: ignored, checkpoints are always written as safetensors")


def _check_agreement(ranks: RankCoordinator, common: object) -> None:
    """Raises UserError, naming the keys whose shared values differ between ranks."""
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
            raise UserError(f"{path_text(path)} (key {part.key}) has no data to save")
        if part.holders or part.is_main_replica:
            chunks.append(part.chunk(part.data.detach().contiguous(), part.holders))
    return chunks


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def _open(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if folders.is_foreign(folder):
        raise UserError(
            f"{folder} is another program's checkpoint (torch .pt or .distcp files); this program reads folders "
            "with rank_NNNNN.safetensors files and a manifest.json"
        )
    return read_manifest(folder)


class _LoadRequest:
    """The requested sharded tensors, the chunks to load for them, and the copies to make after the load."""

    def __init__(self, state: StateDict, folder: Path) -> None:
        self.chunks: list[Chunk] = []
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        """For some sharded tensors, by id: the loaded values, and the view of `data` to copy them into."""
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
        if data.numel():  # a rank may have no part of a tensor, such as a small vocabulary
            self.chunks.append(part.chunk(target))

    def _add_common_part(self, part: ShardedTensor, data: Tensor, stored_shape: tuple[int, ...]) -> None:
        """Loads the common part of a tensor that is stored with another shape. The rest of `data` keeps its values."""
        if part.flattened_range is not None or len(stored_shape) != len(part.global_shape):
            raise UserError(
                f"{part.key} is stored with shape {list(stored_shape)}, which allow_shape_mismatch cannot load "
                f"into {list(part.global_shape)}"
                + (" for a flattened range" if part.flattened_range is not None else "")
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

    def value(self, requested: ShardedTensor | LocalNonpersistentObject, missing: frozenset[str]) -> Any:
        """Returns the value that replaces `requested` in the loaded state dict."""
        if isinstance(requested, LocalNonpersistentObject):
            return requested.unwrap()
        if requested.key in missing:
            return LEFT_OUT
        if id(requested) in self.copies:
            values, target = self.copies[id(requested)]
            target.copy_(values)
        return requested.data if requested.stored is None else requested.stored


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: stored[0].chunk.global_shape for name, stored in open_checkpoint(folder).catalogue.items()}
