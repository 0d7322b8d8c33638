"""Starts the entry scripts and tools by name, in a checkout and where only the wheel is installed.

    megatron-pretrain gpt --num-layers 24 ...                        one process, or a rank under torchrun or srun
    megatron-pretrain --nproc_per_node 8 gpt --num-layers 24 ...     words before the family are those of torchrun
    megatron-preprocess --input corpus.jsonl ...                     tools/preprocess_data.py
    megatron-plan specification.txt                                  tools/plan.py
    python -m megatron                                               lists all programs
    python -m megatron TOOL ...                                      tools/TOOL.py

A program is started as `python FILE WORDS`, so it behaves as in a checkout. In a wheel the entry scripts are modules
beside the package, as they are beside it in a checkout; `tools` is in the folder `megatron/checkout`.
"""

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_PACKAGE = Path(__file__).resolve().parent
FAMILIES = ("gpt", "bert", "t5", "hybrid", "mamba")
"""Model families: `pretrain_FAMILY.py` is the entry script."""

SHORT_NAMES = {"preprocess": "preprocess_data", "convert": "checkpoint/convert"}
"""Names of tools that differ from the name of their file."""


def entry_script(family: str) -> Path:
    """Returns the path of the entry script of a model family of `FAMILIES`."""
    return _PACKAGE.parent / f"pretrain_{family}.py"


def tools_folder() -> Path:
    """Returns the folder `tools` of the wheel or of the checkout."""
    bundled = _PACKAGE / "checkout/tools"
    return bundled if bundled.is_dir() else _PACKAGE.parent / "tools"


def tools() -> dict[str, Path]:
    """Returns the file of each tool, by its path below `tools` without the ending. Files that only other tools import
    are left out."""
    folder = tools_folder()
    files = {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.py"))}
    return {name: file for name, file in files.items() if name != "entry_scripts"}


def command_of(words: Sequence[str]) -> list[str]:
    """Returns the command that the words after `python -m megatron` stand for: `pretrain [TORCHRUN WORDS] FAMILY FLAGS`
    or `TOOL WORDS`. Raises ValueError, with the names that exist, if they name no program."""
    name, *others = words
    if name == "pretrain":
        at = next((place for place, word in enumerate(others) if word in FAMILIES), None)
        if at is None:
            raise ValueError(
                f"pretrain: give the model family, one of {', '.join(FAMILIES)}, before the flags of the run"
            )
        launcher = ["-m", "torch.distributed.run", *others[:at]] if at else []
        return [sys.executable, *launcher, str(entry_script(others[at])), *others[at + 1 :]]
    file = tools().get(SHORT_NAMES.get(name, name).replace("-", "_"))
    if file is None:
        raise ValueError(f"{name}: no such program; there are pretrain, {', '.join([*SHORT_NAMES, *tools()])}")
    return [sys.executable, str(file), *others]


def overview() -> str:
    """Returns a line for each program: its name, and the first sentence of its docstring."""
    rows = {f"pretrain {family}": entry_script(family) for family in FAMILIES} | tools()
    width = max(map(len, rows))
    lines = [f"{name:{width}}  {_summary(file)}" for name, file in rows.items()]
    return "\n".join(["usage: python -m megatron PROGRAM [WORDS]; PROGRAM --help lists its flags", "", *lines])


def _summary(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return text.partition("\n")[0].partition(":   ")[0].partition(". ")[0].rstrip(".:")


def run(words: Sequence[str]) -> NoReturn:
    """Becomes the program that the words name, or prints the versions or the list of programs."""
    if list(words[:1]) == ["--version"]:
        from megatron.training.config.version import version_text

        print(version_text())
        sys.exit(0)
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        sys.exit(0)
    try:
        command = command_of(words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    os.execv(command[0], command)


def main() -> NoReturn:
    """Is the console script `megatron-NAME`: becomes the program NAME."""
    run([Path(sys.argv[0]).stem.removeprefix("megatron-"), *sys.argv[1:]])
