"""From a checkpoint of ours, whatever layout wrote it, to a Hugging Face model, a tensor at a time."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint import Checkpoint
from megatron.core.dist_checkpointing.choosing import Say, find_checkpoint
from megatron.core.dist_checkpointing.chunk import Chunk, is_optimizer_state
from megatron.core.dist_checkpointing.data_file import Entry, Later, write_data_file
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.folders import Step, beside
from megatron.core.dist_checkpointing.planning import describe_names, match
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.exceptions import UserError
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.conversion.choosing import choose_family
from megatron.training.conversion.folder import CONFIG, INDEX, ONE_FILE, TOKENIZER, copy_tokenizer, index_of
from megatron.training.conversion.model import BuildModel, canonical_shapes
from megatron.training.conversion.pieces import DiskTensor, disk_tensors, files_of
from megatron.training.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.training.trained_model import config_for_one_process

_EMBEDDING = "embedding.word_embeddings.weight"
_READ_AT_ONCE = 256 << 20
"""Bytes of tensors that are read together, in the order in which they are written: a block of a file, with what is read
out of it, is then fetched once."""


@dataclass(frozen=True)
class Exported:
    """What an export made."""

    architecture: str
    files: list[str]
    nbytes: int


def export_model(
    root: Path,
    target: Path,
    build_model: BuildModel,
    *,
    step: Step | None = None,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    tokenizer: Path | None = None,
    say: Say = print,
) -> Exported:
    """Write the model of the newest whole checkpoint under `root`, or of one iteration, as a folder that transformers
    loads; `target` must not hold anything.

    The architecture is the first that can say all that makes the model what it is, unless one is named. Weights keep
    their type unless `dtype` gives another; a wider one comes from the optimizer's main weights where there are some.
    Files hold at most `shard_bytes` of tensors, or one tensor. A tokenizer's files are copied from the folder
    `tokenizer`, or from the run's.

    Raises UserError, before anything is written, if no architecture can say the model (naming the flags it cannot say).
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} holds something already; name a folder that is empty or not there yet")
    checkpoint = find_checkpoint(root, step, say)
    if checkpoint is None:
        raise UserError(f"{root} holds no checkpoint")
    config = config_for_one_process(checkpoint.manifest.config, [], has_cuda=False)
    family = choose_family(config, checkpoint.manifest.config, architecture)
    stored = {name: found[0].chunk for name, found in checkpoint.catalogue.items() if not is_optimizer_state(name)}
    if _EMBEDDING not in stored:
        raise UserError(f"{checkpoint.folder}: it has no {_EMBEDDING}")
    vocab_size = stored[_EMBEDDING].global_shape[0]
    shapes = canonical_shapes(config, build_model, vocab_size)
    _check_names(checkpoint, shapes, stored)
    tensors = disk_tensors(family.tensors, shapes)
    dtypes = {name: dtype or chunk.dtype for name, chunk in stored.items()}
    keys = family.config(config.flat()) | {"vocab_size": vocab_size, "torch_dtype": _word(dtypes[_EMBEDDING])}
    tokenizer = tokenizer or _tokenizer_of(config)
    keys |= _special_ids(tokenizer, vocab_size)
    return _write(checkpoint, target, tensors, dtypes, keys, shard_bytes, tokenizer)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def _check_names(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Any]) -> None:
    missing, extra = shapes.keys() - stored.keys(), stored.keys() - shapes.keys()
    problems = [f"{describe_names(missing)} missing"] if missing else []
    problems += [f"{describe_names(extra)} not of its model"] if extra else []
    problems += [
        f"{name} of shape {list(stored[name].global_shape)}, its model has {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and tuple(stored[name].global_shape) != tuple(shape)
    ]
    if problems:
        raise UserError(f"{checkpoint.folder}: {'; '.join(problems)}")


class _Reader:
    """Gives tensors in the order in which they are written, and reads some of those that follow along with each."""

    def __init__(self, checkpoint: Checkpoint, order: Sequence[DiskTensor], dtypes: Mapping[str, torch.dtype]) -> None:
        self.checkpoint, self.dtypes = checkpoint, dtypes
        self.order = iter(order)
        self.ready: dict[str, Tensor] = {}

    def take(self, tensor: DiskTensor) -> Tensor:
        """Its elements, one-dimensional."""
        if tensor.name not in self.ready:
            chunks = list(self._next_chunks())
            fill_tensors(self.checkpoint, match([chunk for _, chunk in chunks], self.checkpoint.catalogue))
            self.ready = {name: chunk.flat for name, chunk in chunks}
        return self.ready.pop(tensor.name)

    def _next_chunks(self) -> Iterator[tuple[str, Chunk]]:
        nbytes = 0
        while nbytes < _READ_AT_ONCE and (tensor := next(self.order, None)) is not None:
            values = torch.empty(tensor.box.shape, dtype=self.dtypes[tensor.canonical_name])
            nbytes += values.nbytes
            yield tensor.name, Chunk(tensor.canonical_name, tensor.global_shape, tensor.box, None, values)


def _write(
    checkpoint: Checkpoint,
    target: Path,
    tensors: Sequence[DiskTensor],
    dtypes: Mapping[str, torch.dtype],
    keys: dict[str, Any],
    shard_bytes: int,
    tokenizer: Path | None,
) -> Exported:
    """All files, in a folder beside that takes the target's name at last."""
    disk, aside = Disk(), beside(target, "tmp")
    try:
        disk.make_directory(aside)
        files, nbytes = _write_tensors(disk, aside, checkpoint, tensors, dtypes, shard_bytes)
        disk.write_file(aside / CONFIG, json.dumps(keys, indent=2, sort_keys=True).encode() + b"\n")
        if tokenizer is not None:
            copy_tokenizer(tokenizer, aside)
        disk.sync_directory(aside)
        disk.rename(aside, target)  # also onto a folder that is empty
        disk.sync_directory(target.parent)
    except OSError as error:
        raise UserError(f"{error.filename or target}: {error.strerror or error}; nothing is exported") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(keys["architectures"][0], files, nbytes)


def _write_tensors(
    disk: Disk,
    folder: Path,
    checkpoint: Checkpoint,
    tensors: Sequence[DiskTensor],
    dtypes: Mapping[str, torch.dtype],
    shard_bytes: int,
) -> tuple[list[str], int]:
    """The files' names and the bytes of all tensors."""
    files = files_of(tensors, lambda tensor: dtypes[tensor.canonical_name], shard_bytes)
    shards = [_in_order(file, dtypes) for file in files]
    reader = _Reader(checkpoint, [tensor for shard in shards for tensor in shard], dtypes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [ONE_FILE]
    for name, shard in zip(names, shards, strict=True):
        write_data_file(disk, folder / name, [_entry(tensor, dtypes, reader) for tensor in shard])
    nbytes = sum(tensor.nbytes(dtypes[tensor.canonical_name]) for tensor in tensors)
    if len(shards) > 1:
        file_of = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        disk.write_file(folder / INDEX, index_of(file_of, nbytes))
    return names, nbytes


def _in_order(shard: Sequence[DiskTensor], dtypes: Mapping[str, torch.dtype]) -> list[DiskTensor]:
    """As they lie in a file: wide types first."""
    return sorted(shard, key=lambda tensor: -dtypes[tensor.canonical_name].itemsize)


def _entry(tensor: DiskTensor, dtypes: Mapping[str, torch.dtype], reader: _Reader) -> Entry:
    later = Later(dtypes[tensor.canonical_name], tensor.box.numel, partial(reader.take, tensor))
    return Entry(tensor.name, tensor.shape, later)


def _special_ids(tokenizer: Path | None, vocab_size: int) -> dict[str, int]:
    """The ids that begin and end a text, as keys of config.json, from a tokenizer's folder."""
    if tokenizer is None or not (tokenizer / TOKENIZER).is_file():
        return {}
    try:
        known = HuggingFaceTokenizer(str(tokenizer), False)
        ids = {"bos_token_id": known.bos, "eos_token_id": known.eod}
    except UserError:  # it ends no text
        return {}
    return {key: number for key, number in ids.items() if number is not None and number < vocab_size}


def _tokenizer_of(config: PretrainConfig) -> Path | None:
    """The folder of the run's tokenizer, if it is one that transformers reads and is still there."""
    model = config.tokenizer.tokenizer_model
    if config.tokenizer.family != "HuggingFaceTokenizer" or model is None:
        return None
    path = Path(model)
    return path if path.is_dir() else path.parent if path.is_file() else None
