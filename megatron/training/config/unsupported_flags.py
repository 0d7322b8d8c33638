"""Flags of Megatron-LM without a field here: accepted where they cannot matter, or refused.

Each has a reason, which is printed when the flag is given. The flags and reasons are in unsupported_flags.toml.
"""

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""The file's tables."""


def reasons(table: str) -> dict[str, str]:
    """Returns the reason of each flag in a table."""
    return {f"--{name}": reason for names, reason in TABLES[table] for name in names.split()}


ACCEPTED_FLAGS = reasons("accepted")
"""Flags that are accepted with any words and change nothing, and why."""

REFUSED_FLAGS = reasons("refused")
"""Flags that stay refused, and why."""


def refusal_of(spelling: str) -> str | None:
    """Returns why a flag with a field stays refused; None for another flag."""
    patterns = reasons("fields_refused").items()
    return next((reason for pattern, reason in patterns if fnmatchcase(spelling, pattern)), None)
