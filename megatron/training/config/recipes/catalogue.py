"""Reads the recipes: sizes of published models, with an optimizer and a schedule, as flags.

A file has `title`, `source` (of sizes and learning rates), `architecture` (the class of transformers; left out where
there is none), `model_family` (left out for GPT), the table [flags] for all its recipes, and a table [recipes.NAME]
each: `parameters` (counted here), `published` and `published_in` where a number of other people was looked up,
`vocabulary` (rows of the embedding), and flags. A flag is written as in a file for --config: the name of its field.
"""

import difflib
import functools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.retired import Occurrence

_FOLDER = Path(__file__).resolve().parent
_NOT_FLAGS = ("parameters", "published", "published_in", "vocabulary")


@dataclass(frozen=True)
class Recipe:
    """A published model: what it is, and the flags that train it."""

    name: str
    title: str
    """Name of its family."""
    parameters: int
    """Number of parameters that its flags give, tied weights counted once, without layers of multi-token prediction."""
    published: int | None
    """The number that its authors, a paper or the files on the hub say; None: it was not looked up."""
    published_in: str
    """Where; empty if it was not looked up."""
    vocabulary: int
    """Rows of its embedding."""
    source: str
    """Where the sizes are published."""
    architecture: str | None
    """Class of transformers; None if there is none."""
    model_family: str
    """gpt, bert or t5: the entry script that trains it."""
    flags: Mapping[str, bool | int | float | str]
    """Values by field. A list over layers is written as on the command line."""

    def occurrences(self) -> Iterator[tuple[Flag, Occurrence]]:
        """Yields its flags, each with the words of a command line."""
        for field, value in self.flags.items():
            flag = flag_table()[field]
            if flag.switch is not None:
                spellings = [spelling for spelling, sets in flag.switch.items() if sets is value]
                yield flag, Occurrence(spellings[0])
            else:
                yield flag, Occurrence(flag.spelling, (str(value),))

    def words(self) -> list[str]:
        """Returns its flags as words of a command line."""
        return [word for _, occurrence in self.occurrences() for word in occurrence.as_words()]


@functools.cache
def recipes() -> dict[str, Recipe]:
    """Returns all recipes by name, sorted by file."""
    found: dict[str, Recipe] = {}
    for path in sorted(_FOLDER.glob("*.toml")):
        for recipe in _read(path):
            assert recipe.name not in found, f"two recipes are called {recipe.name}"
            found[recipe.name] = recipe
    return found


def recipe_named(name: str) -> Recipe:
    """Returns a recipe. Raises UserError with the nearest names if there is none."""
    if name not in recipes():
        longer = [known for known in recipes() if known.startswith(name.lower())]
        near = longer[:4] or difflib.get_close_matches(name.lower(), recipes(), n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(f"{name}: no such recipe; {advice}python tools/recipes.py list lists all")
    return recipes()[name]


@functools.cache
def fields_of_recipes() -> frozenset[str]:
    """Returns the fields that any recipe sets."""
    return frozenset(field for recipe in recipes().values() for field in recipe.flags)


def _read(path: Path) -> Iterator[Recipe]:
    file: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    for name, own in file["recipes"].items():
        yield Recipe(
            name=name,
            title=file["title"],
            parameters=own["parameters"],
            published=own.get("published"),
            published_in=own.get("published_in", ""),
            vocabulary=own["vocabulary"],
            source=file["source"],
            architecture=file.get("architecture"),
            model_family=file.get("model_family", "gpt"),
            flags=file["flags"] | {key: value for key, value in own.items() if key not in _NOT_FLAGS},
        )
