"""A folder of a Hugging Face model: config.json, safetensors files with an index, the tokenizer's files."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.safetensors_file import TensorInFile, read_header
from megatron.core.exceptions import UserError

CONFIG = "config.json"
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"

_TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_BESIDE_THEM = ("generation_config.json",)


@dataclass(frozen=True)
class ModelFolder:
    """What a folder holds. No file is executed, and none but JSON and headers is read until a tensor is."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInFile]


def read_config(path: Path) -> dict[str, Any]:
    """What config.json says. Raises UserError where it is missing or no JSON."""
    if not (path / CONFIG).exists():
        raise UserError(f"{path}: no {CONFIG} is there; the folder of a model has it beside {ONE_FILE} or {INDEX}")
    return read_json(path / CONFIG)


def open_folder(path: Path) -> ModelFolder:
    """Raises UserError naming the file that is missing or wrong, and for pickled weights."""
    return ModelFolder(path, read_config(path), _tensors(path))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Raises UserError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content


def _tensors(path: Path) -> dict[str, TensorInFile]:
    if not (path / INDEX).exists():
        if not (path / ONE_FILE).exists():
            raise UserError(_no_weights(path))
        return read_header(path / ONE_FILE)
    files: dict[str, str] = read_json(path / INDEX).get("weight_map", {})
    tensors: dict[str, TensorInFile] = {}
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise UserError(f"{path / INDEX}: {file!r} is no name of a file in this folder")
        for name, place in read_header(path / file).items():
            if files.get(name) == file:
                tensors[name] = place
    absent = sorted(files.keys() - tensors.keys())
    if absent:
        raise UserError(f"{path / INDEX}: {absent[0]} should be in {files[absent[0]]}, and is not")
    return tensors


def _no_weights(path: Path) -> str:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if not pickled:
        return f"{path}: neither {ONE_FILE} nor {INDEX} is there"
    return (
        f"{path / pickled[0]}: pickled weights run code when they are read, so they are not; load them where you trust "
        f"them and save them as safetensors (`save_pretrained` of transformers does)"
    )


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy a tokenizer's files into a folder, which is made if there are any; their names."""
    names = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    names += [name for name in _BESIDE_THEM if names and (source / name).is_file()]
    if names and source.resolve() != target.resolve():
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(source / name, target / name)
    return names


def index_of(files: Mapping[str, str], nbytes: int) -> bytes:
    """The index file: which file each tensor is in, and bytes of all tensors together."""
    content = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"
