"""How a setting of another program is answered, and what reading a set of such settings gives."""

import difflib
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.training.config.flag_table import flag_table

Values = Mapping[str, Any]
"""Settings by name, of any types."""

AUTO = "auto"
"""Value that leaves a setting to the flags, as in the configs that Transformers and Accelerate complete."""


@dataclass(frozen=True)
class Answer:
    """The answer to one setting."""

    kind: Literal["honoured", "accepted", "refused"]
    text: str
    """Honoured: the flags that it becomes. Otherwise the reason."""
    field: str | None = None
    """Honoured: the field that gets the value; None if a reader function decides."""
    convert: Callable[[object], object] = lambda value: value
    """Honoured: makes the value that the field or the reader function gets. Raises ValueError."""
    harmless: tuple[object, ...] = ()
    """Values that ask for nothing, so that they are neither refused nor worth a line."""


def answer_table(part: Mapping[str, Any], **readers: Callable[[object], object]) -> dict[str, Answer]:
    """Returns the answers in a part of a .toml file of this folder, by name. The part has:

    - `accepted`: lists of names, the reason, and values that print no line (None and False never do);
    - `refused`: lists of names, the reason, and values that ask for nothing (None never does; False does not either if
      the list has no others);
    - `same_named`: lists of a reader and names, which are also those of the fields that they become;
    - [flags]: for each name the field that it becomes, and the reader of its value;
    - [read]: for each name a text about the flags that it becomes, and the reader; code makes these flags.

    Names are separated by blanks; one that ends in a dot is the section of those behind it. A reader is a function of
    this file that converts a value, or one of `readers`. Without one the value stays as it is.
    """
    readers = {"as_given": lambda value: value} | _READERS | readers
    found: dict[str, Answer] = {}
    becomes = {name: (name, reader) for reader, names in part.get("same_named", ()) for name in _names(names)}
    becomes |= {name: (*words.split(), "as_given")[:2] for name, words in part.get("flags", {}).items()}
    for name, (of, reader) in becomes.items():
        found[name] = Answer("honoured", f"`{flag_table()[of].spelling}`", of, readers[reader])
    for name, (text, *reader) in part.get("read", {}).items():
        found[name] = Answer("honoured", text, None, readers[reader[0] if reader else "as_given"])
    for names, reason, *harmless in part.get("accepted", ()):
        found |= dict.fromkeys(_names(names), Answer("accepted", reason, harmless=(None, False, *harmless)))
    for names, reason, *harmless in part.get("refused", ()):
        found |= dict.fromkeys(_names(names), Answer("refused", reason, harmless=(None, *(harmless or (False,)))))
    return found


def _names(text: str) -> Iterator[str]:
    section = ""
    for name in text.split():
        if name.endswith("."):
            section = name
        else:
            yield section + name


def load_answers(file: str) -> dict[str, Any]:
    """Returns the parts of a .toml file of this folder."""
    return tomllib.loads((Path(__file__).parent / file).read_text("utf-8"))


@dataclass(frozen=True)
class Setting:
    """A value that a foreign setting gives to a field."""

    where: str
    """File and name of the setting, for messages."""
    field: str
    value: object
    stated: bool = True
    """False: it is the other program's default, which any flag, file or recipe replaces."""
    unless: tuple[str, ...] = ()
    """Not stated: fields that make it needless if they are given."""


@dataclass
class Reading:
    """What reading a file of settings gives."""

    source: str
    """The flag and the file, for messages."""
    settings: list[Setting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines for the user about single settings."""
    ineffective: dict[str, list[str]] = field(default_factory=dict)
    """Settings that are accepted without effect, by reason."""
    automatic: list[str] = field(default_factory=list)
    """Names of the settings that are left to the flags."""

    def take(self, name: str, field: str, value: object, stated: bool = True, unless: tuple[str, ...] = ()) -> None:
        """Adds the value of a field that the setting `name` gives, or has by default unless it is left to the flags."""
        if not stated and name in self.automatic:
            return
        self.settings.append(Setting(f"{self.source}: {name}", field, value, stated, unless))

    def refuse(self, name: str, reason: str) -> None:
        """Adds a mistake."""
        self.problems.append(f"{self.source}: {name}: {reason}")

    def note(self, name: str, reason: str) -> None:
        """Adds a line for the user."""
        self.notes.append(f"{self.source}: {name}: {reason}")

    def include(self, other: "Reading") -> None:
        """Adds what another set of settings says."""
        self.settings += other.settings
        self.problems += other.problems
        self.notes += other.lines()

    def lines(self) -> list[str]:
        """Returns all lines for the user."""
        lines = list(self.notes)
        for reason, names in self.ineffective.items():
            lines.append(f"{self.source}: no effect of {', '.join(names)}: {reason}")
        if self.automatic:
            lines.append(f"{self.source}: auto, so flags and their defaults decide: {', '.join(self.automatic)}")
        return lines

    def answer(self, name: str, value: object, table: Mapping[str, Answer]) -> object:
        """Answers one setting by the table. A name that the table lacks is a mistake, which names the nearest.

        Returns the value that reader functions use; None if there is none.
        """
        answer = table.get(name)
        if answer is None:
            self.refuse(name, unknown(name, table))
            return None
        if value is None or (value == AUTO and isinstance(value, str)):
            return None
        if answer.kind == "honoured":
            try:
                value = answer.convert(value)
            except ValueError as error:
                self.refuse(f"{name} {shown(value)}", str(error))
                return None
            if answer.field is not None:
                self.take(name, answer.field, value)
            return value
        if answer.kind == "refused" and not is_harmless(value, answer):
            self.refuse(f"{name} {shown(value)}", answer.text)
            return None
        if answer.kind == "accepted" and not is_harmless(value, answer):
            self.ineffective.setdefault(answer.text, []).append(name)
        return value


def is_harmless(value: object, answer: Answer) -> bool:
    """Whether a value asks for nothing. 0 and False are different values, and so are 1 and True."""
    return any(type(value) is type(one) and value == one for one in answer.harmless) or value in ({}, [])


def unknown(name: str, known: Iterable[str]) -> str:
    """Returns the message about an unknown name, with the nearest known ones."""
    known = {".".join(parts[:end]) for parts in (one.split(".") for one in known) for end in range(1, len(parts) + 1)}
    section, _, last = name.rpartition(".")
    beside = [other for other in sorted(known) if other.rpartition(".")[0] == section] or sorted(known)
    near = difflib.get_close_matches(last, [other.rpartition(".")[2] for other in beside], n=3, cutoff=0.6)
    if not near:
        near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    return f"unknown; did you mean {' or '.join(near)}?" if near else "unknown; docs/framework_keys.md lists all"


def shown(value: object) -> str:
    """Returns a value as JSON has it, shortened."""
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def number(value: object) -> float:
    """Returns a number. Raises ValueError for anything else; a text that is a number is one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("expected a number")
    try:
        found = float(value)
    except (ValueError, OverflowError):
        raise ValueError("expected a number") from None
    if not math.isfinite(found):
        raise ValueError("expected a finite number")
    return found


def whole(value: object) -> int:
    """Returns a whole number, such as 5e8. Raises ValueError."""
    found = number(value)
    if found != int(found):
        raise ValueError("expected a whole number")
    return int(found)


def switch(value: object) -> bool:
    """Returns true or false. Raises ValueError."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def word(value: object) -> str:
    """Returns a text; a number is one too. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("expected a text")
    return str(getattr(value, "value", value))


def words(value: object) -> list[str]:
    """Returns the words of a text or of a list of texts. Raises ValueError."""
    if isinstance(value, list | tuple):
        return [word(one) for one in value]
    return word(value).split()


def fields(value: object) -> Values:
    """Returns settings by name. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError("expected fields and values")
    return {str(name): one for name, one in value.items()}


def steps(value: object) -> int:
    """Returns a whole number of steps; infinity is more than any run has. Raises ValueError."""
    return 10**9 if value in (math.inf, "inf") else whole(value)


_READERS = {reader.__name__: reader for reader in (number, whole, steps, switch, word, words, fields)}
