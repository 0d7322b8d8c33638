"""--print-config: prints every value of a run and where it comes from, as a file for --config."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from megatron.core.declarations.config_fields import value_text
from megatron.training.config.config_file import BEGIN, END
from megatron.training.config.flag_table import flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.inspection.run_description import words_of


def config_lines(config: PretrainConfig) -> Iterator[str]:
    """Yields the settings by concern, one per line: name, value, and source (default, flag, derived, or script for a
    user script). Lines of values that no flag gave are comments, so that --config reads the others."""
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
            text = _given(field, values[field]) if source == "flag" else None
            if text is not None:
                yield f"{f'{field}:':<46} {text:<32} # {source}"
            else:
                yield f"{f'# {field}:':<46} {_text(values[field]):<32} # {source}"
    if config.extra:
        yield "# this script's own:"
        yield from (f"{f'# {name}:':<46} {_text(value):<32} # script" for name, value in config.extra.items())
    yield END


def _given(field: str, value: Any) -> str | None:
    """Returns the value as YAML; None if no words of the command line give it, or if it must not be in a file."""
    flag = flag_table()[field]
    if field in ("config_file", "print_config", "dry_run"):
        return None
    if flag.switch is not None:
        return "true" if value else "false"
    words = list(words_of(flag, value))[1:]
    quoted = [word if _PLAIN.fullmatch(word) else json.dumps(word, ensure_ascii=False) for word in words]
    if not words:
        return None
    return quoted[0] if flag.nargs is None else f"[{', '.join(quoted)}]"


_PLAIN = re.compile(r"(?!(?:null|true|false|yes|no|on|off)$)[A-Za-z0-9_./+-][A-Za-z0-9_./+@-]*", re.IGNORECASE)
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


def _text(value: Any) -> str:
    return value.__name__ if callable(value) and hasattr(value, "__name__") else value_text(value)
