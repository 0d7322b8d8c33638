"""From a Hugging Face model to a checkpoint of ours, a tensor at a time."""

import shlex
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.choosing import Say
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.folders import RELEASE, list_folders
from megatron.core.dist_checkpointing.safetensors_file import read_tensor
from megatron.core.dist_checkpointing.writing import Saved, save_streamed
from megatron.core.exceptions import UserError
from megatron.core.utils.files import write_atomically
from megatron.training.config.flag_table import flag_table
from megatron.training.conversion.families import EMBEDDING, FAMILIES, HEAD, Family, family_of
from megatron.training.conversion.folder import CONFIG, TOKENIZER, ModelFolder, copy_tokenizer, open_folder, read_config
from megatron.training.conversion.model import BuildModel, canonical_shapes
from megatron.training.conversion.pieces import DiskTensor, disk_tensors, files_of
from megatron.training.conversion.settings import value_of
from megatron.training.inspection.run_description import describe_run, words_of
from megatron.training.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.training.trained_model import config_for_one_process

FLAGS = "flags.txt"
"""File beside the checkpoint: the flags that make its model."""


@dataclass(frozen=True)
class Imported:
    """What an import made."""

    saved: Saved
    flags: list[str]
    """Words of a command line that describe the model and its tokenizer."""


def import_model(
    source: Path,
    root: Path,
    build_model: BuildModel,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = 4 << 30,
    waived: Sequence[str] = (),
    say: Say = print,
) -> Imported:
    """Write the model of a folder as the checkpoint `release` under `root`, of files of about `file_bytes`.

    Weights keep their type unless `dtype` gives another. The tokenizer's files go to root/tokenizer, and the flags of
    the model to root/flags.txt. Raises UserError, before anything is written, for an architecture or a key of
    config.json that cannot be had, for tensors that are missing, left over, or of another shape, and for a `root` that
    holds a run's checkpoints: the run would go on from the import instead.
    """
    iterations = [found.path.name for found in list_folders(root) if found.step != RELEASE]
    if iterations:
        raise UserError(f"{root} holds checkpoints of a run ({max(iterations)}); name another folder to import into")
    family = _family_in(source)  # before weights are looked for: for an unknown one they do not matter
    folder = open_folder(source)
    vocab_size: int = value_of(folder.config, "vocab_size")
    values = family.values(folder.config, waived)
    tokenizer = _tokenizer_flags(folder, vocab_size, root / "tokenizer", say)
    flags = [*(word for name, value in values.items() for word in words_of(flag_table()[name], value)), *tokenizer]
    length = str(value_of(folder.config, "max_position_embeddings"))
    one_row = ["--micro-batch-size", "1", "--seq-length", length]
    config = config_for_one_process({"command_line": [*one_row, *flags]}, [], has_cuda=False)
    wanted = disk_tensors(family.tensors, canonical_shapes(config, build_model, vocab_size))
    _check(folder, family, wanted, say)
    by_name = {(tensor.canonical_name, tensor.box): tensor for tensor in wanted}

    def values_of(chunk: Chunk) -> Tensor:
        return read_tensor(folder.tensors[by_name[chunk.name, chunk.box].name]).view(-1).to(chunk.tensor.dtype)

    saved = save_streamed(
        root,
        _files(folder, wanted, dtype, file_bytes),
        values_of,
        step=RELEASE,
        common={},
        config=describe_run(config) | {"command_line": [*one_row, *flags]},
    )
    copy_tokenizer(source, root / "tokenizer")
    write_atomically(root / FLAGS, shlex.join(flags) + "\n")
    return Imported(saved, flags)


def _family_in(source: Path) -> Family:
    """The one that config.json names."""
    config = read_config(source)
    names = config.get("architectures") or []
    if len(names) != 1:
        known = ", ".join(family.architecture for family in FAMILIES)
        raise UserError(
            f"{source / CONFIG}: architectures is {names} and model_type {config.get('model_type')!r}; one name is "
            f"needed, of {known}"
        )
    try:
        return family_of(str(names[0]))
    except UserError as error:
        raise UserError(f"{source / CONFIG}: {error}") from error


def _tokenizer_flags(folder: ModelFolder, vocab_size: int, place: Path, say: Say) -> list[str]:
    """The tokenizer of the folder; ids alone where it has none that can be read."""
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size - 1)]
    if not (folder.path / TOKENIZER).is_file():
        say(f"{folder.path} has no {TOKENIZER}: the flags say NullTokenizer, for which text is ids")
        return null
    ids = HuggingFaceTokenizer(str(folder.path), False).vocab_size
    if ids > vocab_size:
        say(f"{folder.path / TOKENIZER} has {ids} ids, the model {vocab_size}: the flags say NullTokenizer")
        return null
    more = ["--vocab-size", str(vocab_size)] if vocab_size > ids else []
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(place), *more]


def _check(folder: ModelFolder, family: Family, wanted: Sequence[DiskTensor], say: Say) -> None:
    """Raises UserError naming what is missing, left over or of another shape."""
    names = {tensor.name for tensor in wanted}
    problems = [f"{folder.path}: {tensor.name} is missing" for tensor in wanted if tensor.name not in folder.tensors]
    extra = sorted(folder.tensors.keys() - names - _copies(folder, names))
    problems += [f"{folder.path}: {name} is no tensor of this model" for name in extra if not family.leaves_out(name)]
    for tensor in wanted:
        found = folder.tensors.get(tensor.name)
        if found is not None and found.shape != tensor.shape:
            problems.append(
                f"{found.path}: {tensor.name} has shape {list(found.shape)}; config.json makes it {list(tensor.shape)}"
            )
        if found is not None and not found.dtype.is_floating_point:
            problems.append(f"{found.path}: {tensor.name} is {found.dtype}: quantized weights cannot be had")
    if problems:
        more = [f"and {len(problems) - 10} problems more"] if len(problems) > 10 else []
        raise UserError("\n".join(problems[:10] + more))
    if extra:
        say(f"{len(extra)} tensors are left out, no weights: {extra[0]}{', ...' if len(extra) > 1 else ''}")


def _copies(folder: ModelFolder, names: Container[str]) -> set[str]:
    """The head's weight where the model shares it with the embedding and the folder has it too: the same, or else
    UserError."""
    head, embedding = (folder.tensors.get(name) for name in (HEAD, EMBEDDING))
    if HEAD in names or head is None or embedding is None:
        return set()
    if not torch.equal(read_tensor(head), read_tensor(embedding)):
        raise UserError(
            f"{folder.path}: config.json says that {HEAD} is {EMBEDDING} (tie_word_embeddings), but they differ"
        )
    return {HEAD}


def _files(
    folder: ModelFolder, wanted: Sequence[DiskTensor], dtype: torch.dtype | None, file_bytes: int
) -> Iterator[list[Chunk]]:
    """The tensors as chunks without memory, a list a file."""

    def dtype_of(tensor: DiskTensor) -> torch.dtype:
        return dtype or folder.tensors[tensor.name].dtype

    for file in files_of(wanted, dtype_of, file_bytes):
        yield [_without_memory(tensor, dtype_of(tensor)) for tensor in file]


def _without_memory(tensor: DiskTensor, dtype: torch.dtype) -> Chunk:
    values = torch.empty(tensor.box.shape, dtype=dtype, device="meta")
    return Chunk(tensor.canonical_name, tensor.global_shape, tensor.box, None, values)
