"""--print-config: prints every value of a run and where it comes from."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core.config_fields import value_text
from megatron.training.config.flag_table import flag_table
from megatron.training.config.pretrain_config import PretrainConfig


def config_lines(config: PretrainConfig) -> Iterator[str]:
    """Yields the settings by concern, a line each: name, value, and source (default, flag, derived, or script for a
    user script)."""
    values = config.flat()
    groups: dict[str, list[str]] = {}
    for field, flag in flag_table().items():
        if field in values:
            groups.setdefault(flag.group, []).append(field)
    groups["follows from the rest"] = [field for field in _derived_only(config) if field not in flag_table()]
    for group, fields in groups.items():
        yield f"{group}:"
        for field in fields:
            yield f"  {field:<44} {_text(values[field]):<32} {config.provenance.get(field, 'derived')}"
    if config.extra:
        yield "this script's own:"
        yield from (f"  {name:<44} {_text(value):<32} script" for name, value in config.extra.items())


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
