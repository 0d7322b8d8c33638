"""Flags of a tool: config dataclasses as for the app, without what only a run needs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.config_fields import describe_problem, unsupported_values, value_text
from megatron.core.exceptions import UserError
from megatron.training.config.command_line import CommandLine, split_words, take_flag, unknown_flag
from megatron.training.config.flag_table import Flag, flags_of
from megatron.training.config.help_text import help_of_flags
from megatron.training.config.retired import Occurrence

Rule = Callable[[Any], Any]


@dataclass(frozen=True)
class Section:
    """A config dataclass of a tool, its heading in --help, and the rule that finds what is wrong with its values."""

    title: str
    config_class: type
    problems: Rule | None = None


@dataclass(frozen=True)
class ToolFlags:
    """What a tool was told."""

    configs: tuple[Any, ...]
    """An object of each section's dataclass, in order."""
    warnings: tuple[str, ...]
    """Flags that are taken for others, or that change nothing here."""


def read_tool_flags(
    argv: Sequence[str], sections: Sequence[Section], usage: str, about: str, renamed: Mapping[str, str] | None = None
) -> ToolFlags:
    """Read the words after a tool's name. Prints help and exits if they ask for it.

    `renamed` maps flags of older releases to those of today. Raises UserError with every mistake, a line each.
    """
    flags = {flag.field: flag for section in sections for flag in flags_of(section.config_class, section.title)}
    by_spelling = {spelling: flag for flag in flags.values() for spelling in flag.spellings}
    line = CommandLine({field: flag.default for field, flag in flags.items()})
    occurrences, strays = split_words(argv)
    if any(occurrence.spelling in ("--help", "-h") for occurrence in occurrences):
        print(help_of_flags(f"usage: {usage}", about, list(flags.values())), end="")
        raise SystemExit(0)
    line.problems += [f"{word}: this word belongs to no flag" for word in strays]
    for occurrence in occurrences:
        _take(line, by_spelling, occurrence, renamed or {})
    configs = tuple(_make(section.config_class, line.values) for section in sections)
    for section, config in zip(sections, configs, strict=True):
        line.problems += _problems_of(section, config, line, flags)
    if line.problems:
        raise UserError("\n".join(dict.fromkeys(line.problems)))
    return ToolFlags(configs, (*line.warnings, *_without_effect(line, flags)))


def _take(
    line: CommandLine, by_spelling: Mapping[str, Flag], occurrence: Occurrence, renamed: Mapping[str, str]
) -> None:
    today = renamed.get(occurrence.spelling)
    if today is not None:
        line.warnings.append(f"{occurrence.spelling}: taken as {today}")
        occurrence = Occurrence(today, occurrence.words)
    if occurrence.spelling in by_spelling:
        take_flag(line, by_spelling[occurrence.spelling], occurrence)
    else:
        line.problems.append(unknown_flag(occurrence.spelling, by_spelling))


def _make(config_class: type, values: Mapping[str, Any]) -> Any:
    return config_class(**{field.name: values[field.name] for field in dataclasses.fields(config_class) if field.init})


def _problems_of(section: Section, config: Any, line: CommandLine, flags: Mapping[str, Flag]) -> list[str]:
    problems = unsupported_values(config)
    if section.problems is not None:
        problems += section.problems(config)
    spelled = [describe_problem(problem, config, lambda field: flags[field].spelling) for problem in problems]
    return [text for text in spelled if not any(flags[field].spelling in text for field in line.broken)]


def _without_effect(line: CommandLine, flags: Mapping[str, Flag]) -> list[str]:
    warnings = []
    for field, spelling in line.given.items():
        declaration = flags[field].declaration
        if declaration.no_effect is not None:
            warnings.append(f"{spelling}: no effect: {declaration.no_effect}")
        parent, _, wanted = (declaration.only_with or "").partition("=")
        if parent and not _is_looked_at(line.values[parent], flags[parent].default, wanted):
            warnings.append(f"{spelling}: no effect without {flags[parent].spelling} {wanted}".rstrip())
    return warnings


def _is_looked_at(value: Any, default: Any, wanted: str) -> bool:
    return value_text(value) == wanted if wanted else value != default
