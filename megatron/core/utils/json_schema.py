"""Schemas of JSON values that come from files. A schema names the first part of a value that does not fit.

    RUN = Record({"iteration": Integer()}, optional={"note": Nullable(Text())})
    RUN.problem({"iteration": -3})      "iteration is -3, not an integer from 0 to 9007199254740992"

Keys that a record does not list are allowed, since newer releases may write more.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

MOST = 1 << 53
"""The largest integer that float64 holds together with all smaller ones; no count of a run is larger."""
MOST_NESTED = 200
"""Levels of a value that code may walk recursively."""


class Schema(Protocol):
    """What a JSON value must look like."""

    def problem(self, value: object, key: str = "") -> str | None:
        """Returns a sentence about the first part of the value that does not fit; None if all fits. `key` is the place
        of the value, such as `common.optimizer`."""


@dataclass(frozen=True)
class Integer:
    """An integer in a range, both ends included."""

    least: int = 0
    most: int = MOST

    def problem(self, value: Any, key: str = "") -> str | None:
        """Returns the first problem of a value."""
        fits = type(value) is int and self.least <= value <= self.most
        return None if fits else _misfit(value, key, f"an integer from {self.least} to {self.most}")


@dataclass(frozen=True)
class Number:
    """A finite number that is not below `least`; with `above`, also not equal to it."""

    least: float = -math.inf
    above: bool = False

    def problem(self, value: Any, key: str = "") -> str | None:
        """Returns the first problem of a value."""
        fits = type(value) in (int, float) and abs(value) < math.inf and (value > self.least or value == self.least)
        if fits and abs(value) <= 1e300 and not (self.above and value == self.least):
            return None
        bound = "" if self.least == -math.inf else f" {'above' if self.above else 'of at least'} {self.least:g}"
        return _misfit(value, key, f"a finite number{bound}")


@dataclass(frozen=True)
class Text:
    """A string that can be written as UTF-8; with `one_line`, without characters that cannot be printed."""

    one_line: bool = False

    def problem(self, value: object, key: str = "") -> str | None:
        """Returns the first problem of a value."""
        fits = isinstance(value, str) and _is_text(value) and (value.isprintable() or not self.one_line)
        return None if fits else _misfit(value, key, "a line of text" if self.one_line else "a string")


@dataclass(frozen=True)
class Boolean:
    """true or false."""

    def problem(self, value: object, key: str = "") -> str | None:
        """Returns the first problem of a value."""
        return None if isinstance(value, bool) else _misfit(value, key, "true or false")


@dataclass(frozen=True)
class OneOf:
    """One of some strings."""

    choices: Sequence[str]

    def problem(self, value: Any, key: str = "") -> str | None:
        """Returns the first problem of a value."""
        fits = isinstance(value, str) and value in self.choices
        return None if fits else _misfit(value, key, f"one of {', '.join(self.choices)}")


@dataclass(frozen=True)
class Nullable:
    """null, or a value that fits another schema."""

    of: Schema

    def problem(self, value: object, key: str = "") -> str | None:
        """Returns the first problem of a value."""
        return None if value is None else self.of.problem(value, key)


@dataclass(frozen=True)
class ListOf:
    """A list whose items fit a schema; with `length`, of so many items."""

    of: Schema
    length: int | None = None

    def problem(self, value: Any, key: str = "") -> str | None:
        """Returns the first problem of a value."""
        if not isinstance(value, list) or (self.length is not None and len(value) != self.length):
            return _misfit(value, key, "a list" if self.length is None else f"a list of {self.length}")
        if isinstance(self.of, Integer) and set(map(type, value)) == {int}:  # the fast way for long lists
            inside = self.of.least <= min(value) and max(value) <= self.of.most
            value = [] if inside else value
        return _first(self.of.problem(item, f"{key}[{index}]") for index, item in enumerate(value))


@dataclass(frozen=True)
class MapOf:
    """An object with any keys, whose values fit a schema."""

    of: Schema

    def problem(self, value: Any, key: str = "") -> str | None:
        """Returns the first problem of a value."""
        if not isinstance(value, dict):
            return _misfit(value, key, "an object")
        return _first(
            self.of.problem(item, _joined(key, name)) if _is_text(name) else f"{_joined(key, name)} is not text"
            for name, item in value.items()
        )


@dataclass(frozen=True)
class Record:
    """An object with some keys, whose values fit their schemas."""

    required: Mapping[str, Schema] = field(default_factory=dict)
    optional: Mapping[str, Schema] = field(default_factory=dict)

    def problem(self, value: object, key: str = "") -> str | None:
        """Returns the first problem of a value."""
        if not isinstance(value, dict):
            return _misfit(value, key, "an object")
        for name, schema in self.required.items():
            if name not in value:
                return f"{_joined(key, name)} is missing"
            found = schema.problem(value[name], _joined(key, name))
            if found is not None:
                return found
        present = ((name, schema) for name, schema in self.optional.items() if name in value)
        return _first(schema.problem(value[name], _joined(key, name)) for name, schema in present)


@dataclass(frozen=True)
class Plain:
    """Any value whose strings are text and that is not nested too deeply to be walked recursively."""

    def problem(self, value: object, key: str = "") -> str | None:
        """Returns the first problem of a value."""
        waiting = [(value, 0)]
        while waiting:
            item, depth = waiting.pop()
            if depth > MOST_NESTED:
                return f"{key or 'the value'} is nested more than {MOST_NESTED} levels deep"
            if isinstance(item, dict):
                waiting += [(each, depth + 1) for pair in item.items() for each in pair]
            elif isinstance(item, list):
                waiting += [(each, depth + 1) for each in item]
            elif isinstance(item, str) and not _is_text(item):
                return f"{key or 'the value'} contains {shown(item)}, which is not text"
        return None


def shown(value: object) -> str:
    """Returns a JSON value for a message: short, in one line, in ASCII."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _misfit(value: Any, key: str, wanted: str) -> str:
    return f"{key or 'the value'} is {shown(value)}, not {wanted}"


def _joined(key: str, name: str) -> str:
    name = ascii(name)[1:-1]
    name = name if len(name) <= 120 else f"{name[:117]}..."
    return f"{key}.{name}" if key else name


def _first(problems: Iterator[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _is_text(text: str) -> bool:
    """Whether a string can be written as UTF-8: JSON may contain half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
