"""Every path, module, flag and identifier that the map, the decisions and the pages on extending name exists."""

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.training.config.flag_table import flags_by_spelling

ROOT = Path(__file__).resolve().parents[2]
MAP, DECISIONS = ROOT / "docs/architecture.md", sorted((ROOT / "docs/decisions").glob("*.md"))
OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "docs/extending.md", "examples/custom_model/README.md")]
PAGES = [MAP, *DECISIONS, *OTHERS]
FOLDERS = ("", "megatron", "megatron/core", "megatron/training")
"""Where a path may begin."""

DEFINED = re.compile(
    r"(?:\bdef|\bclass) (\w+)"  # functions, classes
    r"|^\s*(?:self\.)?(\w+)(?:: [^=\n]+)?(?: = |,? *$)"  # assignments, fields
    r"|^\s+(\w+): "  # fields and parameters on lines of their own
    r"|[(,] *\*{0,2}(\w+): ",  # parameters
    flags=re.M,
)


@functools.cache
def identifiers() -> set[str]:
    """All names that the code defines."""
    folders = ("megatron", "tools", "benchmarks", "examples")
    files = [ROOT / "pretrain_gpt.py", *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    sources = [file.read_text(encoding="utf-8") for file in files]
    sources += re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/extending.md").read_text("utf-8"), flags=re.M | re.S)
    return {name for source in sources for found in DEFINED.findall(source) for name in found}


def exists(word: str) -> bool | None:
    """Whether what a word in backticks names exists; None: it is no name (a formula, a command)."""
    word = word.removesuffix("(...)").removesuffix("()").removeprefix("self.")
    if word in INVENTED:
        return None
    if re.fullmatch(r"--[a-z0-9-]+", word):
        of_tool = rf'"{word}"|^ +{word[2:].replace("-", "_")}: '
        return word in flags_by_spelling() or any(re.search(of_tool, source, flags=re.M) for source in tool_sources())
    if re.fullmatch(r"[\w./*-]+/[\w./*-]*|[\w-]+\.(py|md|toml)", word):
        return any(list((ROOT / folder).glob(word.rstrip("/"))) for folder in FOLDERS) or in_some_folder(word)
    if re.fullmatch(r"(torch|megatron)(\.\w+)+", word):
        return is_importable(word)
    if re.fullmatch(r"\.?[A-Za-z_]\w{2,}(\.\w+)*", word):
        return all(name in identifiers() | OUTSIDE for name in word.strip(".").split("."))
    return None


@functools.cache
def tool_sources() -> tuple[str, ...]:
    return tuple(
        file.read_text(encoding="utf-8") for folder in ("tools", "benchmarks") for file in (ROOT / folder).rglob("*.py")
    )


def in_some_folder(word: str) -> bool:
    """A lone file name, where a page has said the folder already."""
    return "/" not in word and any(any((ROOT / folder).rglob(word)) for folder in ("megatron", "examples"))


def is_importable(word: str) -> bool:
    if word.startswith("torch."):
        owner, _, name = word.rpartition(".")
        return hasattr(functools.reduce(getattr, owner.split(".")[1:], torch), name) or find(word)
    owner, _, name = word.rpartition(".")
    return find(word) or (find(owner) and name in identifiers())


def find(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


OUTSIDE = {"grad", "data", "alltoall", "allgather", "flex", "global_aux_loss", "save_for_backward", "_extra_state"} | {
    "MoEAuxLossAutoScaler",  # Megatron-LM's
    "config",
    "json",
    "args",
    "tokenizers",
    "max",
    "edp",
    "etp",
    "eval",
    "dataclasses",
    "replace",
    "PYTHONPATH",
    "metrics",
    "jsonl",
    "venv",
}
"""Words of PyTorch, of Megatron-LM, of file formats and of flags."""


INVENTED = {"tests/core/x/test_y.py", "megatron/core/x/y.py"} | {
    f"megatron/core/ops/layer_scale{ending}.py" for ending in ("", "_triton")
}
"""Paths of examples."""


def names(page: Path) -> Iterator[tuple[int, str]]:
    """The words in backticks with their lines; and the paths of the map's table of folders."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced = fenced != line.startswith("```")
        if not fenced:
            yield from ((number, word) for word in re.findall(r"`([^`]+)`", line))


def folders_of_map() -> Iterator[str]:
    """The paths that the table of folders begins its lines with."""
    table = MAP.read_text(encoding="utf-8").split("## Folders\n\n```\n")[1].split("```")[0]
    outer = ""
    for line in table.splitlines():
        paths = re.split(r",? +", re.split(r"(?<=[^,])  +", line.strip())[0])
        inside = line.startswith(" ")
        outer = outer if inside or not line else paths[0]
        yield from (outer + path if inside else path for path in paths if path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_every_name_on_the_page_exists(page: Path) -> None:
    missing = [f"line {number}: {word}" for number, word in names(page) if exists(word) is False]
    assert not missing, f"{page.name}: " + "; ".join(missing)


def test_every_folder_on_the_map_exists_and_none_is_missing() -> None:
    named = list(folders_of_map())
    assert len(named) > 40
    assert not [path for path in named if not (ROOT / path).exists()]
    listed = [ROOT / "megatron" / room for room in ("diagnosis", "training", "data", "core")]
    inside = [path for room in listed for path in room.iterdir()]
    rooms = [f"{path.relative_to(ROOT).as_posix()}/" for path in inside if (path / "__init__.py").exists()]
    modules = [path.name for path in inside if path.suffix == ".py" and path.name != "__init__.py"]
    assert len(modules) > 25
    assert not set(rooms) - set(named)
    table = MAP.read_text(encoding="utf-8").split("## Folders")[1].split("##")[0]
    assert not [name for name in modules if not re.search(rf"(?<!\w){re.escape(name)}", table)]


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {page.name for page in DECISIONS} - {"README.md"}


def test_a_name_that_is_gone_is_found() -> None:
    gone = [
        "megatron/core/nothing.py",
        "--no-such-flag",
        "megatron.core.parameters.Nothing",
        "Nothing",
        "torch.nothing",
    ]
    assert [exists(word) for word in gone] == [False] * len(gone)
    there = [
        "megatron/core/parameters.py",
        "--seed",
        "megatron.core.parameters.Box",
        "Box",
        "torch.nn.Linear",
        "tools/",
    ]
    assert [exists(word) for word in there] == [True] * len(there)
    assert exists("[t, h]") is None
