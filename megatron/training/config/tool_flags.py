"""Command lines of the programs in tools/: flags from config dataclasses, as in the app."""

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.core.declarations.config_fields import describe_problem, split_condition, unsupported_values
from megatron.core.exceptions import UserError
from megatron.training.config.command_line import CommandLine, split_words, take_flag, unknown_flag
from megatron.training.config.conditions import condition_holds
from megatron.training.config.flag_table import Flag, flags_of
from megatron.training.config.help_text import help_of_flags, help_topic
from megatron.training.config.retired import Occurrence

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Section:
    """A group of a tool's flags: one config dataclass under one heading of --help."""

    title: str
    """Heading in --help."""
    config_class: type
    """Dataclass whose fields are the flags. Its `validate()`, if it has one, yields what is wrong with the values."""
    problems: Callable[[Any], Iterable[str]] | None = None
    """Another function that finds what is wrong with an object of `config_class`, for a class without `validate()`."""


def read_tool_flags(
    argv: Sequence[str], sections: Sequence[Section], usage: str, about: str, renamed: Mapping[str, str] | None = None
) -> tuple[Any, ...]:
    """Returns one object of each section's dataclass, read from the words after a tool's name. Warns on stderr about
    renamed flags and about flags without effect. Prints help and exits after --help.

    `renamed` maps flags of older releases to their new names. Raises UserError with all mistakes, one per line.
    """
    flags = {flag.field: flag for section in sections for flag in flags_of(section.config_class, section.title)}
    by_spelling = {spelling: flag for flag in flags.values() for spelling in flag.spellings}
    line = CommandLine({field: flag.default for field, flag in flags.items()})
    occurrences, strays = split_words(argv)
    topic = help_topic(occurrences)
    if topic is not None:
        asked = by_spelling.get(f"--{topic.removeprefix('--').replace('_', '-')}")
        chosen = list(flags.values()) if asked is None else [asked]
        print(with_commands_of_wheel(help_of_flags(f"usage: {usage}", about, chosen)), end="")
        raise SystemExit(0)
    line.problems += [f"{word}: this word belongs to no flag" for word in strays]
    for occurrence in occurrences:
        _take(line, by_spelling, occurrence, renamed or {})
    configs = tuple(_make(section.config_class, line.values) for section in sections)
    for section, config in zip(sections, configs, strict=True):
        line.problems += _problems_of(section, config, line, flags)
    if line.problems:
        raise UserError("\n".join(dict.fromkeys(line.problems)))
    for warning in (*line.warnings, *_without_effect(line, flags)):
        print(f"warning: {warning}", file=sys.stderr)
    return configs


def _take(
    line: CommandLine, by_spelling: Mapping[str, Flag], occurrence: Occurrence, renamed: Mapping[str, str]
) -> None:
    today = renamed.get(occurrence.spelling)
    if today is not None:
        line.warnings.append(f"{occurrence.spelling}: read as {today}")
        occurrence = Occurrence(today, occurrence.words)
    if occurrence.spelling in by_spelling:
        take_flag(line, by_spelling[occurrence.spelling], occurrence)
    else:
        line.problems.append(unknown_flag(occurrence.spelling, by_spelling))


def _make(config_class: type, values: Mapping[str, Any]) -> Any:
    return config_class(**{field.name: values[field.name] for field in dataclasses.fields(config_class) if field.init})


def _problems_of(
    section: Section, config: "DataclassInstance", line: CommandLine, flags: Mapping[str, Flag]
) -> list[str]:
    problems = unsupported_values(config)
    validate = section.problems or getattr(section.config_class, "validate", None)
    if validate is not None:
        problems += validate(config)
    spelled = [describe_problem(problem, config, lambda field: flags[field].spelling) for problem in problems]
    return [text for text in spelled if not any(flags[field].spelling in text for field in line.broken)]


def _without_effect(line: CommandLine, flags: Mapping[str, Flag]) -> list[str]:
    warnings = []
    for field, spelling in line.given.items():
        declaration = flags[field].declaration
        if declaration.no_effect is not None:
            warnings.append(f"{spelling}: no effect: {declaration.no_effect}")
        for condition in declaration.only_with:
            parent, words, is_excluded = split_condition(condition)
            if not condition_holds(line.values[parent], flags[parent].default, words, is_excluded):
                wanted = " or ".join(words)
                warnings.append(f"{spelling}: no effect without {flags[parent].spelling} {wanted}".rstrip())
    return warnings


_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


class ToolParser(argparse.ArgumentParser):
    """Raises UserError for mistakes. Its help is the module docstring of the tool, as it is written."""

    def __init__(self, **keywords: object) -> None:
        keywords = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **keywords}
        super().__init__(**keywords)  # type: ignore[arg-type]

    def format_help(self) -> str:
        """Returns the help, with commands that work here."""
        return with_commands_of_wheel(super().format_help())

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of printing the usage and exiting."""
        raise UserError(message.removeprefix("argument "))


def with_commands_of_wheel(text: str) -> str:
    """Returns a text whose commands name tools as `python -m megatron NAME` if the program that runs is in a wheel,
    whose users have no folder `tools`."""
    in_wheel = "megatron/checkout/tools/" in Path(sys.argv[0]).as_posix()
    return re.sub(r"python tools/([\w/]+)\.py", r"python -m megatron \1", text) if in_wheel else text


def number(least: float, most: float, such: str) -> Callable[[str], float]:
    """Returns a parser of numbers within these limits. They may have a unit: 8B is 8e9. `such` are examples for
    messages."""

    def parse(word: str) -> float:
        unit = _UNITS.get(word[-1:].lower(), 1.0)
        try:
            value = float(word[:-1] if unit != 1.0 else word) * unit
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{word}: expected a number from {least:g} to {most:g}, such as {such}")
        return value

    return parse


def whole_number(most: int, such: str) -> Callable[[str], int]:
    """Returns a parser of whole numbers from 1 to `most`. `such` is an example for messages."""

    def parse(word: str) -> int:
        if not (word.isascii() and word.isdecimal()) or not 1 <= int(word) <= most:
            raise argparse.ArgumentTypeError(f"{word}: expected a whole number from 1 to {most}, such as {such}")
        return int(word)

    return parse
