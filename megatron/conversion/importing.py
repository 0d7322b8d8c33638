"""Import: a Hugging Face model becomes a checkpoint of this project, one tensor at a time."""

import dataclasses
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.conversion.families import FAMILIES, architecture_in, family_in
from megatron.conversion.family import PREDICTION_LAYERS, TIE, Family
from megatron.conversion.fp8_folder import read_weight, weight_dtype, with_scales
from megatron.conversion.model import BuildModel, canonical_shapes
from megatron.conversion.model_folder import CONFIG, ModelFolder, open_folder, read_config
from megatron.conversion.tensor_mapping import HubTensor, hub_tensors, split_into_files
from megatron.conversion.text_part import TEXT_PARTS
from megatron.conversion.tokenizer_files import copy_tokenizer, tokenizer_flags
from megatron.conversion.verification import Comparison, check_finite, compare_logits, import_transformers
from megatron.core.dist_checkpointing.checkpoint import open_checkpoint
from megatron.core.dist_checkpointing.checkpoint_selection import Log
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.folders import RELEASE, TRACKER, list_folders
from megatron.core.dist_checkpointing.safetensors_file import TensorInFile, read_tensor
from megatron.core.dist_checkpointing.writing import SaveResult, save_streamed
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
from megatron.core.utils.files import write_atomically
from megatron.training.config.flag_table import flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.inspection.print_config import lines_of_words
from megatron.training.inspection.run_description import describe_run, words_of
from megatron.training.trained_model import config_for_one_process

FLAGS = "flags.yaml"
"""File beside the checkpoint with the flags that describe its model, for --config."""


_ANY_LENGTH = 512
"""Sequence length for models without a largest one."""


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    saved: SaveResult
    flags: list[str]
    """Words of a command line that describe the model and its tokenizer."""
    model_family: str
    """Family of the model, which determines the entry script that trains it."""
    comparison: Comparison | None = None
    """Comparison of logits with transformers, if it was asked for."""


def import_model(
    source: Path,
    root: Path,
    build_model: BuildModel,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = 4 << 30,
    ignored_keys: Sequence[str] = (),
    verify: bool = False,
    families: Sequence[Family] = FAMILIES,
    tokenizer: Path | None = None,
    log: Log = print,
) -> Imported:
    """Writes the model in the folder `source` as the checkpoint `release` under `root`, in files of about `file_bytes`.

    Weights keep their type unless `dtype` is given. The tokenizer's files go to root/tokenizer, and the flags of the
    model to root/flags.yaml. `families` are the known architectures. With `verify`, the logits of the checkpoint are
    compared with those of transformers. With `tokenizer` the flags name that folder, to which the caller copies the
    tokenizer's files.

    Raises UserError before anything is written if the architecture or a key of config.json is unsupported, or if
    tensors are missing, unexpected or of another shape. Also if `root` holds checkpoints of a run, because that run
    would resume from the import. Raises UserError and leaves no checkpoint if a weight is not finite or the logits
    differ.
    """
    iterations = [found.path.name for found in list_folders(root) if found.step != RELEASE]
    if iterations:
        raise UserError(f"{root} holds checkpoints of a run ({max(iterations)}); name another folder to import into")
    if verify:
        import_transformers()
    hub = open_hub_model(source, tokenizer or root / "tokenizer", ignored_keys, families, log)
    config, words = hub.config_for_one_process()
    wanted = hub.tensors(config, canonical_shapes(config, build_model, hub.vocab_size), log)
    family, folder, flags = hub.family, hub.folder, hub.flags
    by_box = {(tensor.canonical_name, box): tensor for tensor in wanted for box in tensor.boxes}

    def values_of(chunk: Chunk) -> Tensor:
        tensor = by_box[chunk.name, chunk.box]
        return _values(folder, tensor, chunk)

    saved = save_streamed(
        root,
        _files(folder, wanted, dtype, file_bytes),
        values_of,
        step=RELEASE,
        common={},
        config=describe_run(config) | {"command_line": words},
    )
    comparison = _verified(saved, root, source, build_model, dtype) if verify else None
    if tokenizer is None:
        copy_tokenizer(source, root / "tokenizer")
    write_flags(root, flags)
    return Imported(saved, flags, family.model_family, comparison)


@dataclass(frozen=True)
class HubModel:
    """A Hugging Face folder that is understood: its family, its tensors, and the flags of its model."""

    family: Family
    folder: ModelFolder
    vocab_size: int
    flags: list[str]
    """Words of a command line for the model and its tokenizer."""
    length: int
    """Largest sequence length, or another one if the model has none."""

    def config_for_one_process(self) -> tuple[PretrainConfig, list[str]]:
        """Returns the settings of the model in one process, and the words that give them."""
        words = ["--micro-batch-size", "1", "--seq-length", str(self.length), *self.flags]
        words += ["--decoder-seq-length", str(self.length)] if self.family.model_family == "t5" else []
        described = {"command_line": words, "model_family": self.family.model_family}
        try:
            return config_for_one_process(described, [], has_cuda=False), words
        except UserError as error:
            file = self.folder.path / CONFIG
            raise UserError("\n".join(f"{file}: as flags: {line}" for line in str(error).splitlines())) from None

    def tensors(self, config: PretrainConfig, shapes: Mapping[str, tuple[int, ...]], log: Log) -> list[HubTensor]:
        """Returns the hub tensors that make the canonical tensors of these shapes: all those of the model.

        Raises UserError naming those that are missing, left over, quantized or of another shape.
        """
        every = hub_tensors(self.family.tensors_of(config.flat()), shapes)
        wanted = [tensor for tensor in every if not tensor.is_copy]
        originals = {tensor.canonical_name: tensor.name for tensor in wanted}
        copies = {tensor.name: originals[tensor.canonical_name] for tensor in every if tensor.is_copy}
        _check_tensors(self.folder, self.family, wanted, copies, log)
        return wanted


def open_hub_model(
    source: Path, tokenizer: Path, ignored_keys: Sequence[str], families: Sequence[Family], log: Log
) -> HubModel:
    """Reads config.json and the headers of a folder. The flags name `tokenizer` as the place of its tokenizer.

    Raises UserError if the architecture or a key of config.json is unsupported.
    """
    file = str(source / CONFIG)
    config = read_config(source)  # first: an unknown architecture is reported before missing weights
    part = TEXT_PARTS.get(architecture_in(config, file, families))
    name = architecture_in(config if part is None else part.config(config, file), file, families)
    family = family_in(name, file, families)
    folder = open_folder(source)
    if part is not None:
        left_out = len(folder.tensors)
        folder = part.folder(folder, file)
        left_out -= len(folder.tensors)
        log(f"{file}: imported the text part of {part.architecture} as {name}, without {left_out} tensors for images")
    tensors = {family.current_name(name): place for name, place in folder.tensors.items()}
    folder = with_scales(dataclasses.replace(folder, tensors=tensors))
    tensors = folder.tensors
    keys = family.complete_config(folder.config, file)
    if family.lacks_prediction_layers(keys, tensors):
        log(f"{source} has no layers of multi-token prediction ({PREDICTION_LAYERS}): imported without them")
        keys[PREDICTION_LAYERS] = 0
    if family.unties and keys[TIE] and _differing(family.copies, tensors):
        log(f"{file}: {TIE} is True, which transformers does not apply: imported with the output layer of the files")
        keys[TIE] = False
    fields = family.fields_of(keys, ignored_keys, file)
    for note in family.notes(keys):
        log(f"{file}: {note}")
    vocab_size = family.vocab_size_of(keys, file)
    flags = [word for name, value in fields.items() for word in words_of(flag_table()[name], value)]
    flags += tokenizer_flags(folder.path, vocab_size, tokenizer, log)
    return HubModel(family, folder, vocab_size, flags, fields.get("max_position_embeddings", _ANY_LENGTH))


def write_flags(root: Path, words: Sequence[str]) -> None:
    """Writes flags to root/flags.yaml, a file for --config, where a foreign name cannot be read as a flag."""
    write_atomically(root / FLAGS, "".join(f"{line}\n" for line in lines_of_words(words)))


def _check_tensors(
    folder: ModelFolder, family: Family, wanted: Sequence[HubTensor], copies: Mapping[str, str], log: Log
) -> None:
    """Raises UserError naming the tensors that are missing, left over, quantized or of another shape. `copies` are the
    names of tensors that repeat another one, and the names of those."""
    names = {tensor.name for tensor in wanted}
    problems = [f"{folder.path}: {tensor.name} is missing" for tensor in wanted if tensor.name not in folder.tensors]
    extra = sorted(folder.tensors.keys() - names - _copies(folder, {**family.copies, **copies}, names))
    problems += [
        f"{folder.tensors[name].path}: the model of config.json has no tensor {name}"
        for name in extra
        if not family.is_constant(name)
    ]
    for tensor in wanted:
        found = folder.tensors.get(tensor.name)
        if found is not None and found.shape != tensor.shape:
            problems.append(
                f"{found.path}: {tensor.name} has shape {list(found.shape)}, but config.json needs {list(tensor.shape)}"
            )
        if found is not None and not found.dtype.is_floating_point:
            problems.append(f"{found.path}: {tensor.name} is {found.dtype}; quantized weights are unsupported")
    if problems:
        more = [f"and {len(problems) - 10} more problems"] if len(problems) > 10 else []
        raise UserError("\n".join(problems[:10] + more))
    if extra:
        rest = ", ..." if len(extra) > 1 else ""
        log(f"left out {len(extra)} tensors that are no weights of {family.architecture}: {extra[0]}{rest}")


def _copies(folder: ModelFolder, copies: Mapping[str, str], names: Container[str]) -> set[str]:
    """Returns those of `copies` that the folder has although the model ties them to others, such as the output weight.

    Raises UserError if two tied tensors differ.
    """
    found = set()
    for copy, original in copies.items():
        places = folder.tensors.get(copy), folder.tensors.get(original)
        if copy in names or places[0] is None or places[1] is None:
            continue
        if _differing({copy: original}, folder.tensors):
            tied = f"{TIE} in config.json says they are one"
            reason = "multi-token prediction has no weight of its own there" if ".layers." in copy else tied
            raise UserError(f"{folder.path}: {copy} and {original} differ, but {reason}")
        found.add(copy)
    return found


def _differing(copies: Mapping[str, str], tensors: Mapping[str, TensorInFile]) -> bool:
    """Whether any two tensors of a file that may be one, by name, differ."""
    pairs = [(tensors[copy], tensors[name]) for copy, name in copies.items() if copy in tensors and name in tensors]
    return not all(torch.equal(read_tensor(copy), read_tensor(original)) for copy, original in pairs)


def _files(
    folder: ModelFolder, wanted: Sequence[HubTensor], dtype: torch.dtype | None, file_bytes: int
) -> Iterator[list[Chunk]]:
    """Yields the tensors of each file of the checkpoint, without memory."""

    def dtype_of(tensor: HubTensor) -> torch.dtype:
        return dtype or weight_dtype(folder, tensor.name)

    for file in split_into_files(wanted, dtype_of, file_bytes):
        yield [_without_memory(tensor, box, dtype_of(tensor)) for tensor in file for box in tensor.boxes]


def _without_memory(tensor: HubTensor, box: Box, dtype: torch.dtype) -> Chunk:
    values = torch.empty(box.shape, dtype=dtype, device="meta")
    return Chunk(tensor.canonical_name, tensor.global_shape, box, None, values)


def _values(folder: ModelFolder, tensor: HubTensor, chunk: Chunk) -> Tensor:
    """Returns the elements of a chunk, which is a box of a hub tensor, one-dimensional, in the chunk's type."""
    place = folder.tensors[tensor.name]
    values = tensor.take(read_weight(folder, tensor.name), chunk.box).to(chunk.tensor.dtype)
    check_finite(values, f"{place.path}: {tensor.name}", place.dtype)
    return values


def _verified(
    saved: SaveResult, root: Path, source: Path, build_model: BuildModel, dtype: torch.dtype | None
) -> Comparison:
    """Compares logits. If they differ, removes the checkpoint and raises UserError."""
    try:
        comparison = compare_logits(open_checkpoint(saved.folder), source, build_model, imported_as=dtype)
        comparison.check(str(source))
    except BaseException:
        shutil.rmtree(saved.folder, ignore_errors=True)
        (root / TRACKER).unlink(missing_ok=True)
        raise
    return comparison
