"""Folders of Hugging Face models: config.json, safetensors files with or without an index."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def read_config(path: Path) -> dict[str, Any]:
    """Returns the keys of config.json in a folder. Raises UserError if there is no such folder, or if the file is
    missing or not JSON."""
    if not path.is_dir():
        raise UserError(f"{path}: {'this is a file, not a folder' if path.exists() else 'no such folder'}")
    if not (path / CONFIG).exists():
        raise UserError(f"{path} has no {CONFIG}; a model's folder has it beside {ONE_FILE} or {INDEX}")
    return read_json(path / CONFIG, with_nan=True)  # limits of step sizes may be Infinity


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
    for file in sorted(set(files.values())):
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
