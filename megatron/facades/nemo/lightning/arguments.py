"""Tables of the arguments of NeMo's classes: a row says the name, the default, and what this package does with it."""

import difflib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron.facades.nemo.lightning.bases import with_lightning
from megatron.facades.nemo.lightning.flags import Flags

Foreign = Any
"""An object of a user or of another package: only the attributes that its documentation names are used."""


@dataclass(frozen=True)
class Argument:
    """An argument of a class. Without `field`, `note` and `refusal` the class's own code reads it."""

    name: str
    default: object = None
    field: str | None = None
    """The setting of a run that the argument gives: the name of the field behind a flag."""
    note: str | None = None
    """Why another value than the default changes nothing here; it is printed."""
    refusal: str | None = None
    """What works instead of another value than the default, which is an error."""


class ArgumentValues:
    """A base class whose constructor takes the arguments of a table, by position or by name. Each becomes an attribute.

    With `lightning_class`, a module of Lightning and a class in it, an object is an instance of that class too if
    Lightning has been imported. `own_keywords` has the keywords that are not in the table, if the subclass allows them;
    otherwise they are a TypeError, as everywhere in Python.
    """

    table: Sequence[Argument] = ()
    takes_more = False
    lightning_class: tuple[str, str] | None = None

    def __init_subclass__(cls) -> None:
        """Shows the table as the signature of the constructor."""
        more = [inspect.Parameter("more", inspect.Parameter.VAR_KEYWORD)] if cls.takes_more else []
        plain = signature_of(cls.table)
        cls.__signature__ = plain.replace(parameters=[*plain.parameters.values(), *more])  # type: ignore[attr-defined]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Makes it an instance of Lightning's class too."""
        made: Self = object.__new__(cls if cls.lightning_class is None else with_lightning(cls, *cls.lightning_class))
        return made

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.own_keywords: dict[str, object] = {}
        names = {argument.name for argument in self.table}
        if self.takes_more:
            self.own_keywords = {name: kwargs.pop(name) for name in [*kwargs] if name not in names}
        try:
            bound = signature_of(self.table).bind(*args, **kwargs)
        except TypeError as error:
            near = nearest(next((name for name in kwargs if name not in names), ""), names)
            raise TypeError(f"{type(self).__name__}(): {error}{near and '; ' + near}") from None
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            setattr(self, name, value)

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings, notes and refusals of the table's rows."""
        for argument in self.table:
            give(flags, type(self).__name__, argument, getattr(self, argument.name))
        for name in self.own_keywords:
            near = nearest(name, [row.name for row in self.table])
            flags.refuse(f"{type(self).__name__}({name}=...)", f"there is no such argument; {near or 'leave it out'}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a question for the nearest known name; empty if none is near."""
    found = difflib.get_close_matches(name, list(known), 1, 0.75)
    return f"did you mean {found[0]}?" if found else ""


def signature_of(table: Sequence[Argument]) -> inspect.Signature:
    """Returns the signature of a function that takes the arguments of a table."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(row.name, kind, default=row.default) for row in table])


def give(flags: Flags, owner: str, argument: Argument, value: object) -> None:
    """Adds what a row says about a value to the flags of a run."""
    is_default = value is argument.default or value == argument.default
    if argument.field is not None:
        if value is not None:
            flags.give(argument.field, value)
    elif is_default:
        return
    elif argument.refusal is not None:
        flags.refuse(f"{owner}({argument.name}={shown(value)})", argument.refusal)
    elif argument.note is not None:
        flags.note(f"{owner}({argument.name}={shown(value)}) has no effect: {argument.note}")


def shown(value: object) -> str:
    """Returns a value for a message: short literals as they are, other objects by their class."""
    plain = isinstance(value, str | int | float | bool | None | list | tuple | dict)
    return repr(value) if plain else f"<{type(value).__name__}>"
