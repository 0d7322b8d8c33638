"""Export: a checkpoint of this project, written by any layout, becomes a Hugging Face model, one tensor at a time."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.conversion.families import FAMILIES
from megatron.conversion.family import Family
from megatron.conversion.family_choice import choose_family
from megatron.conversion.hub_defaults import ALIASES
from megatron.conversion.model import BuildModel, canonical_shapes, vocab_size_of
from megatron.conversion.model_folder import CONFIG, INDEX, ONE_FILE, index_of, new_folder, refuse_used
from megatron.conversion.tensor_mapping import HubTensor, hub_tensors, split_into_files
from megatron.conversion.tokenizer_files import special_ids, writer_of_tokenizer
from megatron.conversion.verification import (
    Comparison,
    check_finite,
    compare_logits,
    import_transformers,
    why_not_verified,
)
from megatron.core.dist_checkpointing.checkpoint import Checkpoint
from megatron.core.dist_checkpointing.checkpoint_selection import Log, open_newest
from megatron.core.dist_checkpointing.chunk import Chunk, is_weight
from megatron.core.dist_checkpointing.data_file import LazyTensor, TensorEntry, write_data_file
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.folders import Step
from megatron.core.dist_checkpointing.planning import describe_names, match
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
from megatron.training.adapters import refuse_adapters
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.recorded_flags import words_of_spec
from megatron.training.inspection.run_description import architecture_differences
from megatron.training.trained_model import config_for_one_process

_READ_AT_ONCE = 256 << 20
"""Bytes of tensors that are read together, in the order of writing, so that each block of a file is read once."""


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    architecture: str
    files: list[str]
    """Names of the safetensors files."""
    nbytes: int
    """Size of all tensors."""
    comparison: Comparison | None = None
    """Comparison of logits with transformers, if it was asked for."""


def export_model(
    root: Path,
    target: Path,
    build_model: BuildModel | None,
    *,
    step: Step | None = None,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    tokenizer: Path | None = None,
    verify: bool | None = False,
    spec: Sequence[str] | None = None,
    average: bool = False,
    families: Sequence[Family] = FAMILIES,
    log: Log = print,
) -> Exported:
    """Writes the model of a checkpoint under `root` as the folder `target`, which transformers can load.

    The checkpoint is the newest whole one, or that of iteration `step`. The architecture is the first of `families`
    that expresses the model, unless one is named. Weights keep their type unless `dtype` is given; a wider type takes
    the optimizer's main weights if the checkpoint has them. A file holds at most `shard_bytes` of tensors, or one
    tensor. The tokenizer's files are copied from the folder `tokenizer`, or from the run's. With `verify`, the logits
    of the checkpoint are compared with those that transformers computes from the written files, before the folder gets
    its name. None verifies where that is possible, and logs why it is not.
    With `average` the moving average of the weights (--ema-decay) takes their place; nothing is verified.
    `spec` are module and name of the layers, for a model that was trained with --spec.

    Without `build_model` the checkpoint's tensors are taken as those of the model, and nothing is verified: a run
    exports its own checkpoint so, without building the model again.

    Raises UserError if `target` is not empty, if no architecture expresses the model (naming the flags), if a weight is
    NaN or infinite, or if the logits differ. `target` is complete or does not exist.
    """
    refuse_used(target)
    if verify:
        import_transformers()
    checkpoint = open_newest(root, step, log)
    refuse_adapters(checkpoint.folder, checkpoint.manifest.config)
    config = config_for_one_process(checkpoint.manifest.config, words_of_spec(spec), has_cuda=False)
    _check_flags(checkpoint, config)
    family = choose_family(config, architecture, families)
    stored = {name: found[0].chunk for name, found in checkpoint.catalogue.items() if is_weight(name)}
    vocab_size = vocab_size_of(checkpoint)
    if build_model is None:
        shapes = {name: tuple(chunk.global_shape) for name, chunk in stored.items()}
    else:
        shapes = canonical_shapes(config, build_model, vocab_size)
    _check_names(checkpoint, shapes, stored)
    if average:
        log("the moving average is exported; its logits are not compared, since the checkpoint's model has the weights")
        verify = False
    if verify is None and build_model is not None:
        reason = why_not_verified(family.architecture, sum(map(math.prod, shapes.values())))
        if reason is not None:
            log(f"the export is not verified: {reason}")
        verify = reason is None
    tensors = hub_tensors(family.tensors_of(config.flat()), shapes)
    dtypes = {name: dtype or chunk.dtype for name, chunk in stored.items()}
    main_dtype = str(dtypes["embedding.word_embeddings.weight"]).removeprefix("torch.")
    keys = family.config_of(config.flat()) | {"vocab_size": vocab_size, "torch_dtype": main_dtype}
    aliases = ALIASES.get(family.model_type, {})  # a class without vocab_size in its config reads the second name
    keys |= dict.fromkeys((alias for alias, key in aliases.items() if key == "vocab_size"), vocab_size)
    keys |= special_ids(config, tokenizer, vocab_size, log)
    write_tokenizer = writer_of_tokenizer(config.tokenizer, tokenizer, log)
    stored_as = checkpoint.averages() if average else {}
    writer = _Writer(checkpoint, build_model, tensors, dtypes, shard_bytes, bool(verify), spec, stored_as)
    return writer.write(target, keys, write_tokenizer)


def _check_flags(checkpoint: Checkpoint, config: PretrainConfig) -> None:
    """Raises UserError if the flags in the checkpoint do not give the architecture that it describes."""
    differences = architecture_differences(config, checkpoint.manifest.config)
    if differences:
        raise UserError(
            f"{checkpoint.folder}: its flags give another model than it describes: {'; '.join(differences)}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def _check_names(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Any]) -> None:
    """Raises UserError naming the tensors that are missing, left over or of another shape."""
    missing, extra = shapes.keys() - stored.keys(), stored.keys() - shapes.keys()
    problems = [f"{describe_names(missing)} missing"] if missing else []
    problems += [f"its model has no tensor {describe_names(extra)}"] if extra else []
    problems += [
        f"{name} has shape {list(stored[name].global_shape)}, but its model needs {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and tuple(stored[name].global_shape) != tuple(shape)
    ]
    if problems:
        raise UserError(f"{checkpoint.folder}: {'; '.join(problems)}")


class _Reader:
    """Reads tensors in the order in which they are written, several at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        order: Sequence[HubTensor],
        dtypes: Mapping[str, torch.dtype],
        stored_as: Mapping[str, str],
    ) -> None:
        self.checkpoint, self.dtypes, self.stored_as = checkpoint, dtypes, stored_as
        self.order = iter(order)
        self.ready: dict[str, Tensor] = {}

    def take(self, tensor: HubTensor) -> Tensor:
        """Returns the tensor's elements, one-dimensional. Raises UserError if one is NaN or infinite."""
        if tensor.name not in self.ready:
            chunks = list(self._next_chunks())
            every = [chunk for _, boxes in chunks for chunk in boxes]
            fill_tensors(self.checkpoint, match(every, self.checkpoint.catalogue))
            self.ready = {found.name: found.join([chunk.flat for chunk in boxes]) for found, boxes in chunks}
        values = self.ready.pop(tensor.name)
        stored = self.checkpoint.catalogue[tensor.canonical_name][0].chunk.dtype
        check_finite(values, f"{self.checkpoint.folder}: {tensor.canonical_name}", stored)
        return values

    def _next_chunks(self) -> Iterator[tuple[HubTensor, list[Chunk]]]:
        """Yields tensors with memory for each of their boxes."""
        nbytes = 0
        while nbytes < _READ_AT_ONCE and (tensor := next(self.order, None)) is not None:
            nbytes += tensor.nbytes(self.dtypes[tensor.canonical_name])
            yield tensor, [self._empty(tensor, box) for box in tensor.boxes]

    def _empty(self, tensor: HubTensor, box: Box) -> Chunk:
        values = torch.empty(box.shape, dtype=self.dtypes[tensor.canonical_name])
        name = self.stored_as.get(tensor.canonical_name, tensor.canonical_name)
        return Chunk(name, tensor.global_shape, box, None, values)


@dataclass(frozen=True)
class _Writer:
    """Writes the folder of a model."""

    checkpoint: Checkpoint
    build_model: BuildModel | None
    tensors: Sequence[HubTensor]
    dtypes: Mapping[str, torch.dtype]
    """Types to write, by canonical name."""
    shard_bytes: int
    verify: bool
    spec: Sequence[str] | None = None
    """Module and name of the layers."""
    stored_as: Mapping[str, str] = field(default_factory=dict)
    """Names in the checkpoint of the tensors to write, by canonical name, where the two differ."""

    def write(self, target: Path, keys: Mapping[str, Any], write_tokenizer: Callable[[Path], object]) -> Exported:
        """Writes all files into a temporary folder beside `target`, and renames that at the end."""
        with new_folder(target, "exported") as (disk, aside):
            files, nbytes = self._write_tensors(disk, aside)
            disk.write_file(aside / CONFIG, json.dumps(keys, indent=2, sort_keys=True).encode() + b"\n")
            write_tokenizer(aside)
            comparison = self._compare(aside, target) if self.verify else None
        return Exported(keys["architectures"][0], files, nbytes, comparison)

    def _compare(self, folder: Path, target: Path) -> Comparison:
        assert self.build_model is not None
        comparison = compare_logits(self.checkpoint, folder, self.build_model, exported_as=self.dtypes, spec=self.spec)
        comparison.check(f"{target} is not written")
        return comparison

    def _write_tensors(self, disk: Disk, folder: Path) -> tuple[list[str], int]:
        """Returns the names of the files and the size of all tensors."""
        files = split_into_files(self.tensors, self._dtype, self.shard_bytes)
        shards = [sorted(file, key=lambda tensor: -self._dtype(tensor).itemsize) for file in files]  # wide types first
        reader = _Reader(self.checkpoint, [tensor for shard in shards for tensor in shard], self.dtypes, self.stored_as)
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        names = names if len(shards) > 1 else [ONE_FILE]
        for name, shard in zip(names, shards, strict=True):
            write_data_file(disk, folder / name, [self._entry(tensor, reader) for tensor in shard])
        nbytes = sum(tensor.nbytes(self._dtype(tensor)) for tensor in self.tensors)
        if len(shards) > 1:
            file_of = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            disk.write_file(folder / INDEX, index_of(file_of, nbytes))
        return names, nbytes

    def _dtype(self, tensor: HubTensor) -> torch.dtype:
        return self.dtypes[tensor.canonical_name]

    def _entry(self, tensor: HubTensor, reader: _Reader) -> TensorEntry:
        return TensorEntry(
            tensor.name, tensor.shape, LazyTensor(self._dtype(tensor), tensor.numel, partial(reader.take, tensor))
        )
