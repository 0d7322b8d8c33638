"""Which keywords the functions and classes of a script take: those of its release of Megatron-LM. A class is inspected
once."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Keywords:
    """The keywords of a function."""

    names: frozenset[str]
    """Those of its parameters."""
    takes_all: bool
    """Whether it takes any keyword."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Keywords":
        """Returns the keywords of a function, which may be a bound method or a partial."""
        parameters = inspect.signature(function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return cls(frozenset(parameters), takes_all)

    @classmethod
    @functools.cache
    def of_forward(cls, kind: type) -> "Keywords":
        """Returns the keywords of the `forward` of a class of modules."""
        return cls.of(kind.forward)  # type: ignore[attr-defined]

    @classmethod
    @functools.cache
    def of_constructor(cls, kind: type) -> "Keywords":
        """Returns the keywords of a constructor. A constructor with **kwargs passes them on, so it also takes the
        keywords of the next constructor in the order of bases."""
        names: set[str] = set()
        for base in kind.__mro__:
            if "__init__" not in vars(base) or base is object:  # that of object takes 10 ms to inspect
                continue
            own = cls.of(vars(base)["__init__"])
            names |= own.names
            if not own.takes_all:
                break
        return cls(frozenset(names), False)

    def __contains__(self, name: str) -> bool:
        return self.takes_all or name in self.names

    def chosen_from(self, offered: Mapping[str, object]) -> dict[str, object]:
        """Returns the offered keywords that the function takes."""
        return {name: value for name, value in offered.items() if name in self}
