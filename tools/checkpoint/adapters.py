"""Low-rank adapters (--lora-rank): PEFT's files in and out, and merged models.

python tools/checkpoint/adapters.py merge --load adapters --save merged
python tools/checkpoint/adapters.py export --load adapters --peft-dir for-peft
python tools/checkpoint/adapters.py import --peft-dir theirs --base Qwen3-8B --save adapters

A merged model is a checkpoint named release, which --pretrained-checkpoint, tools/generate.py, tools/evaluate.py and
tools/checkpoint/convert.py export take. docs/adapting.md has examples.
"""

import os
import sys

# Python must not search this folder for modules: it would take inspect.py for its own module of that name.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(os.path.dirname(_HERE)), *(path for path in sys.path if path != _HERE)]

import shlex  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

from megatron.interrupts import exit_quietly, run_main, tells_mistakes  # noqa: E402

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.conversion.merging import merge_adapters  # noqa: E402
from megatron.conversion.peft import export_adapters, import_adapters  # noqa: E402
from megatron.core.exceptions import UserError  # noqa: E402
from megatron.core.utils.store_path import local_folder, place  # noqa: E402
from megatron.training.config.tool_flags import Section, read_tool_flags  # noqa: E402
from tools.entry_scripts import build_model  # noqa: E402

PROGRAM = "python tools/checkpoint/adapters.py"
ABOUT = "Merges low-rank adapters into their model, and converts them to PEFT's files and back."
ACTIONS = ("merge", "export", "import")


@dataclass(kw_only=True, frozen=True)
class MergeConfig:
    """Flags of a merge."""

    load: str | None = None
    """Folder of checkpoints with adapters, as in a run's --save. Required."""

    ckpt_step: int | None = None
    """Iteration of the checkpoint. Default: the newest whole checkpoint."""

    base: str | None = None
    """Folder of the model that the adapters belong to. Default: the one that the checkpoint names."""

    save: str | None = None
    """Folder to write the whole model to, as a checkpoint named release; it must be empty or not exist. Required."""


@dataclass(kw_only=True, frozen=True)
class ExportConfig:
    """Flags of an export."""

    load: str | None = None
    """Folder of checkpoints with adapters, as in a run's --save. Required."""

    ckpt_step: int | None = None
    """Iteration of the checkpoint. Default: the newest whole checkpoint."""

    peft_dir: str | None = None
    """Folder to write adapter_config.json and adapter_model.safetensors to; it must be empty or not exist. Required."""

    architecture: str | None = None
    """Class of transformers that the adapters are for. Default: the first that supports the model."""


@dataclass(kw_only=True, frozen=True)
class ImportConfig:
    """Flags of an import."""

    peft_dir: str | None = None
    """Folder with adapter_config.json and adapter_model.safetensors. Required."""

    base: str | None = None
    """Folder of the model that the adapters belong to: one of the hub, or of our checkpoints. Required."""

    save: str | None = None
    """Folder to write the checkpoint to, as in a run's --save; it must be empty or not exist. The checkpoint is named
    release. Required."""


def missing(config: MergeConfig | ExportConfig | ImportConfig, *names: str) -> list[str]:
    """Returns a problem for each of these flags that was not given."""
    return [f"{{{name}:name}} is required" for name in names if getattr(config, name) is None]


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["merge"]:
        section = Section("merge", MergeConfig, lambda config: missing(config, "load", "save"))
        run_merge(read_tool_flags(words[1:], [section], f"{PROGRAM} merge [flags]", ABOUT)[0])
    elif words[:1] == ["export"]:
        exporting = Section("export", ExportConfig, lambda config: missing(config, "load", "peft_dir"))
        run_export(read_tool_flags(words[1:], [exporting], f"{PROGRAM} export [flags]", ABOUT)[0])
    elif words[:1] == ["import"]:
        importing = Section("import", ImportConfig, lambda config: missing(config, "peft_dir", "base", "save"))
        run_import(read_tool_flags(words[1:], [importing], f"{PROGRAM} import [flags]", ABOUT)[0])
    elif words[:1] in (["--help"], ["-h"]):
        print(f"usage: {PROGRAM} {'|'.join(ACTIONS)} [flags]\n\n{ABOUT}\n\nACTION --help lists the flags")
    else:
        other = f", not {words[0]}" if words else ""
        raise UserError(f"the first word must be one of {', '.join(ACTIONS)}{other}")
    return 0


def run_merge(config: MergeConfig) -> None:
    """Merges, and prints where the model is."""
    base = Path(config.base) if config.base else None
    saved = merge_adapters(
        place(config.load or ""),
        local_folder("--save", config.save or ""),
        build_model,
        step=config.ckpt_step,
        base=base,
    )
    print(f"{saved.folder}: {saved.nbytes / 1e6:.1f} MB in {saved.seconds:.1f} s")


def run_export(config: ExportConfig) -> None:
    """Exports, and prints the number of adapted layers."""
    layers = export_adapters(
        place(config.load or ""),
        Path(config.peft_dir or ""),
        build_model,
        step=config.ckpt_step,
        architecture=config.architecture,
    )
    print(f"{config.peft_dir}: adapters of {len(layers)} layers, from {layers[0]} to {layers[-1]}")


def run_import(config: ImportConfig) -> None:
    """Imports, and prints the flags of a run that continues with the adapters."""
    base = Path(config.base or "")
    saved, flags = import_adapters(
        Path(config.peft_dir or ""), local_folder("--save", config.save or ""), base, build_model
    )
    print(f"{saved.folder}: {saved.nbytes / 1e6:.1f} MB in {saved.seconds:.1f} s")
    of_base = "--load-hf" if (base / "config.json").is_file() else "--pretrained-checkpoint"
    print(f"to train them, give {of_base} {base} --load {config.save} --finetune {shlex.join(flags)}")


if __name__ == "__main__":
    run_main(main)
