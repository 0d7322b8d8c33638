"""The words of the command line that a field accepts, by the field's type annotation."""

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Words:
    """The words of the command line that a flag accepts."""

    kind: type
    """Type of one value."""
    parse: Callable[[str], Any]
    """Turns one word into a value. Raises ValueError that says what works."""
    choices: tuple[str, ...] | None = None
    """All words that work; None: any word that `parse` accepts."""
    is_list: bool = False
    """Whether the field holds a list, with one value per word."""


def word_type(annotation: object) -> Words:
    """Returns the words that a field with this type annotation accepts."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        members = [word_type(argument) for argument in arguments if argument is not type(None)]
        return members[-1]  # `str | list[str]`: the words of a list; `takes_one_or_list` allows a single word
    if origin is Literal:
        return Words(type(arguments[0]), choice({str(word): word for word in arguments}), tuple(map(str, arguments)))
    if origin is list:
        return dataclasses.replace(word_type(arguments[0]), is_list=True)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return Words(annotation, choice(annotation.__members__), tuple(annotation.__members__))
    parsers: dict[object, Callable[[str], object]] = {int: whole_number, float: number, str: str}
    return Words(annotation if isinstance(annotation, type) else str, parsers.get(annotation, str))


def takes_one_or_list(annotation: object) -> bool:
    """Whether the annotation is like `str | list[str]`: a single word gives a value, several words a list."""
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    return len(members) == 2 and typing.get_origin(members[1]) is list


def choice(values: Mapping[str, object]) -> Callable[[str], object]:
    """Returns a parser that maps the keys to their values. It raises ValueError with all keys for any other word."""

    def parse(word: str) -> object:
        if word not in values:
            raise ValueError(f"choose from {', '.join(values)}")
        return values[word]

    return parse


def whole_number(word: str) -> int:
    """Returns the word as an integer of 64 bits. Raises ValueError; for other numbers it names the nearest integer."""
    try:
        found = int(word)
    except ValueError:
        pass
    else:
        if not -(2**63) <= found < 2**63:
            raise ValueError(f"expected a whole number of at most {2**63 - 1}")
        return found
    try:
        value = float(word)
    except ValueError:
        raise ValueError("expected a whole number") from None
    near = f"; {round(value)} works" if math.isfinite(value) and abs(value) < 1e18 else ""
    raise ValueError(f"expected a whole number{near}")


def number(word: str) -> float:
    """Returns the word as a finite number. Raises ValueError."""
    try:
        value = float(word)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value
