"""The text of --help: working flags by section, then the names of flags without effect and of unsupported flags."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from megatron.core.config_fields import value_text
from megatron.training.config.flag_table import Flag, can_be, flag_table, is_inert, is_to_come

_COLUMN = 36
"""Column where descriptions begin."""

_ABOUT = (
    "Train a GPT model, in one process or in several that torchrun starts. --dry-run checks the flags and describes "
    "the run; --print-config shows every value and its source."
)


def help_text(program: str, extra: str = "") -> str:
    """Returns the help of the app. `extra` is the help of the arguments that a script has added."""
    return help_of_flags(f"usage: [torchrun ...] {program} [flags]", _ABOUT, list(flag_table().values()), extra)


def help_of_flags(usage: str, about: str, flags: Sequence[Flag], extra: str = "") -> str:
    """Returns the help of these flags: a usage line, a description, a section per group."""
    width = min(shutil.get_terminal_size().columns, 120)
    to_come = [flag for flag in flags if is_to_come(flag)]
    inert = [flag for flag in flags if is_inert(flag) and flag not in to_come]
    working = [flag for flag in flags if flag not in inert and flag not in to_come]
    lines = [usage, "", *_filled(about, width)]
    for group in dict.fromkeys(flag.group for flag in working):
        lines += ["", f"{group}:"]
        for flag in working:
            if flag.group == group:
                lines += _entry(flag, width)
    if inert:
        lines += _names("accepted without effect", inert, width)
    if to_come:
        lines += _names("not supported yet (an error where they would change the run)", to_come, width)
    if extra:
        lines += ["", extra.rstrip()]
    return "\n".join(lines) + "\n"


def _entry(flag: Flag, width: int) -> list[str]:
    head = "  " + ", ".join(flag.spellings) + _placeholder(flag)
    turns_off = flag.switch is not None and not flag.switch[flag.spelling]
    text = ("Turn this off: " if turns_off else "") + flag.help + _default(flag)
    body = textwrap.wrap(text, max(width - _COLUMN, 30), break_on_hyphens=False)
    if len(head) <= _COLUMN - 2 and body:
        return [head.ljust(_COLUMN) + body[0], *(" " * _COLUMN + line for line in body[1:])]
    return [head, *(" " * _COLUMN + line for line in body)]


def _placeholder(flag: Flag) -> str:
    """Placeholder of the value: {a,b} for a few choices, N for integers, X for numbers."""
    if flag.switch is not None:
        return ""
    word = {"whole_number": "N", "number": "X"}.get(getattr(flag.parse, "__name__", ""), "TEXT")
    if flag.choices:
        choices = ",".join(choice for choice in flag.choices if can_be(flag, choice))
        word = f"{{{choices}}}" if len(choices) < 60 else "NAME"
    if isinstance(flag.nargs, int):
        return f" {word}" * flag.nargs
    return f" {word} ..." if flag.nargs else f" {word}"


def _default(flag: Flag) -> str:
    shown = flag.switch is None and flag.default not in (None, [], "")
    return f" [{value_text(flag.default)}]" if shown else ""


def _names(title: str, flags: Iterable[Flag], width: int) -> list[str]:
    return ["", f"{title}:", *_filled(" ".join(flag.spelling for flag in flags), width, indent="  ")]


def _filled(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
