"""Which flags have an effect beside the values of other flags: the conditions of `only_with` and `or_with`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron.core.declarations.config_fields import split_condition, value_text
from megatron.training.config.flag_table import Flag, flag_table

UNKNOWN = object()
"""Stands for a value that is not known. Conditions on it hold."""
ValueOf = Callable[[str], Any]
"""Returns the value of a field, or UNKNOWN."""


@dataclass(frozen=True)
class Condition:
    """A condition on the value of a flag."""

    flag: Flag
    words: tuple[str, ...]
    """Values. Empty: all except the default."""
    is_excluded: bool
    """Whether these are the values that the flag must not have."""

    def holds(self, value: object) -> bool:
        """Whether the condition holds for a value of the flag."""
        return value is UNKNOWN or condition_holds(value, self.flag.default, self.words, self.is_excluded)

    def is_possible(self) -> bool:
        """Whether a supported value meets the condition."""
        return self.is_excluded or not self.words or any(can_be(self.flag, word) for word in self.words)

    def text(self) -> str:
        """Returns the condition as `with --flag value` or `without --flag value`."""
        spelling, switch = self.flag.spelling, self.flag.switch
        if switch is not None:
            return f"{'with' if switch[spelling] == self._wanted() else 'without'} {spelling}"
        if self.is_excluded or self.words == ("None",):
            return f"without {spelling} {' or '.join(() if self.words == ('None',) else self.words)}".rstrip()
        return f"with {spelling} {' or '.join(self.words)}".rstrip()

    def lack(self, value: object) -> str:
        """Returns why the condition does not hold for a value: `without --other`, `with --no-other` or `while --other
        is 1`."""
        spelling, switch = self.flag.spelling, self.flag.switch
        if switch is not None:
            return f"{'without' if switch[spelling] == self._wanted() else 'with'} {spelling}"
        if self.is_excluded or self.words == ("None",):
            return f"with {spelling} {value_text(value)}"
        if self.words or value is None:
            return f"without {spelling} {' or '.join(self.words)}".rstrip()
        return f"while {spelling} is {value_text(value)}"

    def _wanted(self) -> bool:
        return not self.words or (self.words == ("True",)) != self.is_excluded


def condition_holds(value: object, default: object, words: tuple[str, ...], is_excluded: bool) -> bool:
    """Whether a value meets a condition with the parts that `split_condition` returns."""
    if words:
        return (value_text(value) in words) != is_excluded
    return value is not None and value is not False and (value != default or default is True)


def needs_of(flag: Flag) -> list[Condition]:
    """Returns the conditions that must all hold for the flag to have an effect. Leaves out those on flags of tools."""
    return _conditions(flag.declaration.only_with)


def ways_of(flag: Flag) -> list[Condition]:
    """Returns the conditions of which each gives the flag an effect even if those of `needs_of` do not hold."""
    return _conditions(flag.declaration.or_with)


def _conditions(texts: Iterable[str]) -> list[Condition]:
    table, parts = flag_table(), map(split_condition, texts)
    return [Condition(table[name], words, is_excluded) for name, words, is_excluded in parts if name in table]


def lacking(flag: Flag, value_of: ValueOf) -> Condition | None:
    """Returns the condition for want of which a flag has no effect; None if it has one."""
    for way in ways_of(flag):
        if way.holds(value_of(way.flag.field)) and lacking(way.flag, value_of) is None:
            return None
    for need in needs_of(flag):
        if not need.holds(value_of(need.flag.field)):
            return need
        deeper = lacking(need.flag, value_of)
        if deeper is not None:
            return deeper
    return None


def is_inert(flag: Flag) -> bool:
    """Whether the flag is accepted but never changes anything, or depends on a flag of this kind."""
    if flag.declaration.no_effect is not None:
        return True
    return not flag.declaration.or_with and any(is_inert(need.flag) for need in needs_of(flag))


def is_to_come(flag: Flag) -> bool:
    """Whether the flag's feature is not supported yet: only its default works, or it depends on a flag of this kind."""
    supported = flag.declaration.supported
    if supported is not None and len(supported) == 1:
        return True
    if flag.declaration.or_with:
        return False
    return any(not need.is_excluded and (is_to_come(need.flag) or not need.is_possible()) for need in needs_of(flag))


def can_be(flag: Flag, word: str) -> bool:
    """Whether this value of the flag is supported."""
    supported = flag.declaration.supported
    return not word or supported is None or word in [value_text(value) for value in supported]
