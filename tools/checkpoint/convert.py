"""Turn a Hugging Face model into a checkpoint, or a checkpoint into a Hugging Face model.

python tools/checkpoint/convert.py import --hf-dir Qwen3-8B --save converted
python tools/checkpoint/convert.py export --load checkpoints --hf-dir my-model

No layout is asked for: any layout loads any checkpoint, and an export reads what any layout wrote. docs/checkpoints.md
says more.
"""

import os
import sys

# This folder must not be searched for modules: its inspect.py would stand in for Python's own.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(os.path.dirname(_HERE)), *(path for path in sys.path if path != _HERE)]

import re  # noqa: E402
import shlex  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Literal  # noqa: E402

import torch  # noqa: E402

from megatron.core.config_fields import flag  # noqa: E402
from megatron.core.exceptions import UserError  # noqa: E402
from megatron.training.config.tool_flags import Section, read_tool_flags  # noqa: E402
from megatron.training.conversion.exporting import export_model  # noqa: E402
from megatron.training.conversion.families import FAMILIES  # noqa: E402
from megatron.training.conversion.importing import FLAGS, import_model  # noqa: E402
from pretrain_gpt import build_model  # noqa: E402

PROGRAM = "python tools/checkpoint/convert.py"
KNOWN = ", ".join(family.architecture for family in FAMILIES)
ABOUT = f"Convert models between the Hugging Face hub's format and ours, bit for bit. Architectures: {KNOWN}."

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size_in_bytes(word: str) -> int:
    """As 5GB or 500MiB."""
    match = re.fullmatch(r"(\d+)([A-Za-z]*)", word)
    if match is None or match[2] not in UNITS or int(match[1]) == 0:
        raise ValueError(f"not a size, such as 5GB ({', '.join(unit for unit in UNITS if unit)})")
    return int(match[1]) * UNITS[match[2]]


@dataclass(kw_only=True, frozen=True)
class ImportConfig:
    """Flags of an import."""

    hf_dir: str | None = None
    """Folder of the model: config.json and safetensors files. Required."""

    save: str | None = None
    """Folder for the checkpoint, as a run's --save; it is called release. Required."""

    dtype: Dtype | None = None
    """Type of the weights; as they are when not given."""

    file_size: int = flag(4 << 30, parse=size_in_bytes)
    """Bytes of a file, about; 4GiB when not given."""

    ignore_config_keys: list[str] | None = flag(None, nargs="+")
    """Keys of config.json to leave out that would else be refused because nobody here knows what they mean."""


@dataclass(kw_only=True, frozen=True)
class ExportConfig:
    """Flags of an export."""

    load: str | None = None
    """Folder of checkpoints, as a run's --save. Required."""

    ckpt_step: int | None = None
    """Iteration of the checkpoint; the newest whole one when not given."""

    hf_dir: str | None = None
    """Folder to write; it must not hold anything yet. Required."""

    architecture: str | None = None
    """Class of transformers to export as; the first that can say the model when not given."""

    dtype: Dtype | None = None
    """Type of the weights; as they are when not given. A wider one takes the optimizer's main weights, if there are."""

    max_shard_size: int = flag(5 * 10**9, parse=size_in_bytes)
    """Bytes of tensors in a file, at most; 5GB when not given."""

    tokenizer_model: str | None = None
    """Folder to copy the tokenizer's files from; the run's own when not given."""


def missing(config: ImportConfig | ExportConfig, *names: str) -> list[str]:
    """A problem for each of these flags that was not given."""
    return [f"{{{name}:name}} is required" for name in names if getattr(config, name) is None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["import"]:
            section = Section("import", ImportConfig, lambda config: missing(config, "hf_dir", "save"))
            run_import(read_tool_flags(words[1:], [section], f"{PROGRAM} import [flags]", ABOUT).configs[0])
        elif words[:1] == ["export"]:
            section = Section("export", ExportConfig, lambda config: missing(config, "load", "hf_dir"))
            run_export(read_tool_flags(words[1:], [section], f"{PROGRAM} export [flags]", ABOUT).configs[0])
        elif words[:1] in (["--help"], ["-h"]):
            print(f"usage: {PROGRAM} import|export [flags]\n\n{ABOUT}\n\nimport --help and export --help list flags")
        else:
            raise UserError(f"the first word is import or export{f', not {words[0]}' if words else ''}")
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return 0


def run_import(config: ImportConfig) -> None:
    """Convert, and say with which flags to train."""
    root = Path(config.save or "")
    done = import_model(
        Path(config.hf_dir or ""),
        root,
        build_model,
        dtype=DTYPES[config.dtype] if config.dtype else None,
        file_bytes=config.file_size,
        waived=config.ignore_config_keys or (),
    )
    print(f"{done.saved.folder}: {done.saved.nbytes / 1e6:.1f} MB in {done.saved.seconds:.1f} s")
    print(f"flags of the model, in {root / FLAGS}:\n  {shlex.join(done.flags)}")
    print(f"train it with these, --pretrained-checkpoint {root} and the flags of a run; any layout loads it")


def run_export(config: ExportConfig) -> None:
    """Convert, and say as what."""
    target = Path(config.hf_dir or "")
    done = export_model(
        Path(config.load or ""),
        target,
        build_model,
        step=config.ckpt_step,
        architecture=config.architecture,
        dtype=DTYPES[config.dtype] if config.dtype else None,
        shard_bytes=config.max_shard_size,
        tokenizer=Path(config.tokenizer_model) if config.tokenizer_model else None,
    )
    print(f"{target}: {done.architecture}, {done.nbytes / 1e6:.1f} MB in {len(done.files)} files")


if __name__ == "__main__":
    sys.exit(main())
