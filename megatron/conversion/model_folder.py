"""Folders of Hugging Face models: config.json, safetensors files with or without an index."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.folders import sibling_name
from megatron.core.dist_checkpointing.safetensors_file import TensorInFile, read_header
from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json

CONFIG = "config.json"
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFolder:
    """Contents of a model's folder. Tensors are read later; no file is executed."""

    path: Path
    config: dict[str, Any]
    """The keys of config.json."""
    tensors: dict[str, TensorInFile]
    """Where each tensor is, by name."""
    scales: Mapping[str, TensorInFile] = field(default_factory=dict)
    """Where the scales of fp8 weights are, by the name of the weight."""


def read_config(path: Path) -> dict[str, Any]:
    """Returns the keys of config.json in a folder. Raises UserError if there is no such folder, or if the file is
    missing or not JSON."""
    if not path.is_dir():
        raise UserError(f"{path}: {'this is a file, not a folder' if path.exists() else 'no such folder'}")
    if not (path / CONFIG).exists():
        raise UserError(f"{path} has no {CONFIG}; a model's folder has it beside {ONE_FILE} or {INDEX}")
    return read_json(path / CONFIG, with_nan=True)  # limits of step sizes may be Infinity


def refuse_used(target: Path) -> None:
    """Raises UserError unless `target` is an empty folder or does not exist."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not empty; name a folder that is empty or does not exist")


@contextlib.contextmanager
def new_folder(target: Path, what: str) -> Iterator[tuple[Disk, Path]]:
    """Yields a temporary folder beside `target`, which becomes `target` at the end; an empty folder may be there. If
    anything fails, `target` does not appear, and an error of the disk ends with "nothing is" `what`."""
    disk, aside = Disk(), sibling_name(target, "tmp")
    try:
        disk.make_directory(aside)
        yield disk, aside
        disk.sync_directory(aside)
        disk.rename(aside, target)
        disk.sync_directory(target.absolute().parent)
    except OSError as error:
        raise UserError(f"{error.filename or target}: {error.strerror or error}; nothing is {what}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def open_folder(path: Path) -> ModelFolder:
    """Reads config.json and the headers of the safetensors files.

    Raises UserError naming the file that is missing or invalid, and for pickled weights.
    """
    return ModelFolder(path, read_config(path), _tensors(path))


def read_json(path: Path, with_nan: bool = False) -> dict[str, Any]:
    """Returns the JSON object in a file, with `with_nan` also one with NaN and Infinity. Raises UserError if there is
    none."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"), with_nan)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content


def _tensors(path: Path) -> dict[str, TensorInFile]:
    if not (path / INDEX).exists():
        if not (path / ONE_FILE).exists():
            raise UserError(_no_weights(path))
        return read_header(path / ONE_FILE)
    files = read_json(path / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{path / INDEX}: weight_map must be an object of file names")
    tensors: dict[str, TensorInFile] = {}
    names = sorted(set(files.values()))
    missing = [file for file in names if Path(file).name == file and not (path / file).exists()]
    if missing:
        also = f", and {len(missing) - 1} more files" if len(missing) > 1 else ""
        raise UserError(f"{path / INDEX}: weight_map names {missing[0]}{also}, missing in the folder: copy it again")
    for file in names:
        if Path(file).name != file:
            raise UserError(f"{path / INDEX}: weight_map names {file!r}, which is not a file in this folder")
        for name, place in read_header(path / file).items():
            if files.get(name) == file:
                tensors[name] = place
    absent = sorted(files.keys() - tensors.keys())
    if absent:
        raise UserError(f"{path / INDEX}: weight_map places {absent[0]} in {files[absent[0]]}, which does not have it")
    return tensors


def _no_weights(path: Path) -> str:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if not pickled:
        return f"{path} has neither {ONE_FILE} nor {INDEX}"
    return (
        f"{path / pickled[0]}: pickled weights are refused, because reading them can run code; load the model where "
        f"you trust it and save it as safetensors (`save_pretrained` of transformers does)"
    )


def index_of(files: Mapping[str, str], nbytes: int) -> bytes:
    """Returns the content of the index file. `files` gives each tensor's file; `nbytes` is the size of all tensors."""
    content = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"
