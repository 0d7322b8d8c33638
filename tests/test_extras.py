"""The packages that the code imports are those that pyproject.toml asks for."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STANDARD = {*sys.stdlib_module_names, "_typeshed"}  # the latter for type checkers alone
OTHER_NAMES = {"yaml": "pyyaml", "google": "tensorboard", "transformer_engine": "transformer-engine"}
"""Modules that are not called like the package that brings them."""
LOADERS = ("import_module", "load_library", "find_spec")
EXTRAS = {
    "training",
    "mlm",
    "te",
    "ssm",
    "hf",
    "gguf",
    "sft",
    "parquet",
    "s3",
    "wandb",
    "loggers",
    "nemo",
    "serve",
    "eval",
    "docs",
    "release",
    "dev",
}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower() for requirement in requirements}


def imported(source: str) -> Iterator[str]:
    """The packages of all imports in a module, those inside functions and those by name included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in LOADERS and isinstance(node.args[0].value, str):
                yield node.args[0].value.split(".")[0]


def test_every_import_is_a_dependency_or_in_an_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    offered = names_of(PROJECT["dependencies"]) | {
        name for extra, needed in extras.items() if extra != "dev" for name in names_of(needed)
    }
    ours = {"megatron", "tools", *(file.stem for file in ROOT.glob("*.py"))}
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for folder in ("megatron", "tools")
        for file in (ROOT / folder).rglob("*.py")
        for name in imported(file.read_text())
        if name not in STANDARD and name not in ours and OTHER_NAMES.get(name, name) not in offered
    }
    assert not missing


def test_the_extras_that_pages_name() -> None:
    extras = PROJECT["optional-dependencies"]
    assert extras.keys() == EXTRAS
    page = (ROOT / "docs" / "installation.md").read_text()
    assert all(f"`{extra}`" in page for extra in EXTRAS)
    own = {name for needed in extras.values() for name in re.findall(r"megatron-pretraining\[([\w,]+)\]", str(needed))}
    assert set(",".join(own).split(",")) <= EXTRAS
