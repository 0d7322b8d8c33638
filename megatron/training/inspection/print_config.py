"""Files for --config: --print-config prints every value of a run and where it comes from; the flags of an import."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.training.config.config_file import BEGIN, END
from megatron.training.config.flag_table import flag_table, text_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.recorded_flags import read_recorded
from megatron.training.config.training import SOURCES_OF_FLAGS
from megatron.training.inspection.run_description import value_words


def config_lines(config: PretrainConfig) -> Iterator[str]:
    """Yields the settings by concern, one per line: name, value, and source (default, flag, derived, recipe, or
    script for a user script). Lines of values that no flag gave are comments, so that --config reads the others."""
    values = config.flat()
    groups: dict[str, list[str]] = {}
    for field, flag in flag_table().items():
        if field in values:
            groups.setdefault(flag.group, []).append(field)
    groups["follows from the rest"] = [field for field in _derived_only(config) if field not in flag_table()]
    yield BEGIN
    for group, fields in groups.items():
        yield f"# {group}:"
        for field in fields:
            source = config.provenance.get(field, "derived")
            text = _given(field, values[field]) if source in ("flag", "recipe") else None
            if text is not None:
                yield f"{f'{field}:':<46} {text:<32} # {source}"
            else:
                yield f"{f'# {field}:':<46} {_text(values[field], field):<32} # {source}"
    if config.extra:
        yield "# this script's own:"
        yield from (f"{f'# {name}:':<46} {_text(value):<32} # script" for name, value in config.extra.items())
    yield END


def lines_of_words(words: Sequence[str]) -> Iterator[str]:
    """Yields the lines of a file for --config that gives the flags of these words."""
    line = read_recorded(words)
    for field in line.given:
        text = _given(field, line.values[field])
        if text is not None:
            yield f"{field}: {text}"


def _given(field: str, value: Any) -> str | None:
    """Returns the value as YAML; None if no words of the command line give it, or if it must not be in a file."""
    flag = flag_table()[field]
    if field in (*SOURCES_OF_FLAGS, "print_config", "dry_run"):
        return None
    if flag.switch is not None:
        return "true" if value else "false"
    words = [_scalar(word) for word in value_words(flag, value)]
    if value is None or (not words and flag.nargs == "+"):
        return None
    return words[0] if flag.nargs is None else f"[{', '.join(words)}]"


def _scalar(word: str) -> str:
    """Returns a word as a YAML scalar on one line."""
    return word if _PLAIN.fullmatch(word) else f'"{"".join(map(_escaped, word))}"'


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() and letter not in '"\\' else f"\\U{ord(letter):08x}"


_PLAIN = re.compile(
    r"(?!(?:null|true|false|yes|no|on|off|-+)$)[A-Za-z0-9_./+-][A-Za-z0-9_./+@-]*", re.IGNORECASE | re.ASCII
)
"""Words that need no quotes in YAML."""


def _derived_only(config: PretrainConfig) -> Iterator[str]:
    """Fields without a flag whose value is not the library's default."""
    seen = set()
    for part in config.parts():
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name not in seen and field.name != "transformer" and not field.name.startswith("_"):
                seen.add(field.name)
                if value != field.default and value not in (None, []):
                    yield field.name


def _text(value: object, field: str = "") -> str:
    """Returns a value on one line, for a comment."""
    text = value.__name__ if callable(value) and hasattr(value, "__name__") else text_of(field, value)
    return text if text.isprintable() else _scalar(text)
