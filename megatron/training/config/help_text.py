"""The texts of --help: the sections, a section, a flag, or all working flags and the names of the others."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from megatron.core.declarations.config_fields import value_text
from megatron.core.exceptions import UserError
from megatron.training.config.conditions import can_be, is_inert, is_to_come, needs_of, ways_of
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.retired import REFUSED, RETIRED, Occurrence, translate
from megatron.training.config.unsupported_flags import ACCEPTED_FLAGS, REFUSED_FLAGS, refusal_of

_COLUMN = 36
"""Column where descriptions begin."""

_MORE = (
    "--help SECTION describes the flags of a section, --help FLAG one flag, --help all all of them. --version prints "
    "versions."
)

_ABOUT = (
    "Train a GPT model, in one process or in several that torchrun starts. --dry-run checks the flags and describes "
    "the run; --print-config shows every value and its source."
)


def help_topic(occurrences: Sequence[Occurrence]) -> str | None:
    """Returns the topic of --help: the words after it, otherwise the flag after it, otherwise "". None without
    --help."""
    for place, occurrence in enumerate(occurrences):
        if occurrence.spelling in ("--help", "-h"):
            following = [other.spelling for other in occurrences[place + 1 : place + 2]]
            return " ".join(occurrence.words or following)
    return None


def help_about(program: str, topic: str, extra: str = "") -> str:
    """Returns the help about a topic: "" (names of the flags by section), "all", a section or a flag, which may be
    shortened. `extra` is the help of the arguments that a script has added. Raises UserError for another topic."""
    if topic == "all":
        return help_text(program, extra)
    if not topic:
        return _overview(program, extra)
    name = topic.removeprefix("--").replace("_", "-")
    flags = list(flag_table().values())
    for spelling in (topic, f"--{name}"):  # --local_rank is another flag than --local-rank
        answer = answer_without_field(spelling)
        if answer is not None:
            return f"{spelling}: {answer.text()}\n"
        for flag in flags:
            if spelling in flag.spellings or flag.field == topic:
                return _about_flag(flag)
    if re.search(rf"--{re.escape(name)}(?![\w-])", extra):
        return extra
    groups = [group for group in dict.fromkeys(flag.group for flag in flags) if topic.lower() in group.lower()]
    if groups:
        chosen = [flag for flag in flags if flag.group in groups]
        return help_of_flags(f"usage: [torchrun ...] {program} [flags]", "", chosen)
    sections = ", ".join(dict.fromkeys(flag.group for flag in flags))
    raise UserError(f"--help {topic}: no such section and no such flag; the sections are {sections}")


def _overview(program: str, extra: str) -> str:
    """Returns the names of the working flags by section."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [f"usage: [torchrun ...] {program} [flags]", "", *_filled(f"{_ABOUT} {_MORE}", width)]
    working = [flag for flag in flag_table().values() if not is_inert(flag) and not is_to_come(flag)]
    for group in dict.fromkeys(flag.group for flag in working):
        lines += _names(group, [flag for flag in working if flag.group == group], width)
    if extra:
        lines += ["", extra.rstrip()]
    return "\n".join(lines) + "\n"


def _about_flag(flag: Flag) -> str:
    """Returns the lines about what a flag does, its default, how it is answered, and related flags."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = _entry(flag, width)
    conditions = [*needs_of(flag), *ways_of(flag)]
    answer = answer_of(flag)
    if answer.reason:
        lines += _filled(answer.text(), width, "  ")
    if conditions:
        needs = " and ".join(need.text() for need in needs_of(flag))
        ways = "".join(f", or {way.text()}" for way in ways_of(flag))
        lines += _filled(f"Has an effect only {needs}{ways}.", width, "  ")
    named = _names_in(flag.help)
    related = [
        other.spelling
        for other, on_which, names in _links()
        if other is not flag
        and (flag in on_which or named.intersection(other.spellings) or names.intersection(flag.spellings))
    ]
    if related:
        lines += _filled(f"Related: {' '.join(related)}", width, "  ")
    lines += _filled(f"Section: {flag.group}. In a --config file: {flag.field}.", width, "  ")
    return "\n".join(lines) + "\n"


@cache
def _links() -> list[tuple[Flag, list[Flag], set[str]]]:
    """Returns each flag with the flags that its effect depends on, and the names in its help."""
    return [
        (flag, [condition.flag for condition in (*needs_of(flag), *ways_of(flag))], _names_in(flag.help))
        for flag in flag_table().values()
    ]


def _names_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z0-9][\w-]*", text))


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
        lines += _names("not supported (an error where they would change the run)", to_come, width)
    if extra:
        lines += ["", extra.rstrip()]
    return "\n".join(lines) + "\n"


def _entry(flag: Flag, width: int) -> list[str]:
    head = "  " + ", ".join(flag.spellings) + _placeholder(flag)
    body = textwrap.wrap(answer_of(flag).meaning, max(width - _COLUMN, 30), break_on_hyphens=False)
    if len(head) <= _COLUMN - 2 and body:
        return [head.ljust(_COLUMN) + body[0], *(" " * _COLUMN + line for line in body[1:])]
    return [head, *(" " * _COLUMN + line for line in body)]


def _placeholder(flag: Flag) -> str:
    """Returns the placeholder of the value: {a,b} for a few choices, N for integers, X for numbers."""
    if flag.switch is not None:
        return ""
    word = {"whole_number": "N", "number": "X"}.get(getattr(flag.parse, "__name__", ""), "TEXT")
    if flag.choices:
        choices = ",".join(choice for choice in flag.choices if can_be(flag, choice))
        word = f"{{{choices}}}" if len(choices) < 60 else "NAME"
    if isinstance(flag.nargs, int):
        return f" {word}" * flag.nargs
    return f" {word} ..." if flag.nargs else f" {word}"


def _names(title: str, flags: Iterable[Flag], width: int) -> list[str]:
    return ["", f"{title}:", *_filled(" ".join(flag.spelling for flag in flags), width, indent="  ")]


def _filled(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


Kind = Literal["honoured", "accepted without effect", "translated", "refused"]


@dataclass(frozen=True)
class Answer:
    """How a flag is answered."""

    spellings: tuple[str, ...]
    """All spellings of the flag."""
    kind: Kind
    meaning: str = ""
    """What the flag does, or would do, and its default in brackets. Empty for a flag without a field."""
    reason: str = ""
    """Why it has no effect or is refused, or how it is translated. Empty for a flag that is honoured."""
    group: str = ""
    """Section of --help. Empty for a flag without a field."""

    def text(self) -> str:
        """Returns the reason as a sentence."""
        if self.kind == "translated":
            return f"{self.reason[0].upper()}{self.reason[1:]}."
        return f"{self.kind[0].upper()}{self.kind[1:]}: {self.reason}."


def answer_of(flag: Flag) -> Answer:
    """Returns how a flag with a field is answered."""
    kind: Kind = "honoured"
    reason = ""
    if is_to_come(flag):
        kind, reason = "refused", refusal_of(flag.spelling) or "not supported yet"
    elif is_inert(flag):
        kind, reason = "accepted without effect", flag.declaration.no_effect or ""
        reason = reason or f"goes with {needs_of(flag)[0].flag.spelling}"
    has_default = flag.switch is None and flag.default not in (None, [], "")
    meaning = f"{flag.help} [{value_text(flag.default)}]" if has_default else flag.help
    return Answer(flag.spellings, kind, meaning, reason, flag.group)


def answer_without_field(spelling: str) -> Answer | None:
    """Returns how a flag without a field is answered; None for an unknown flag."""
    if spelling in RETIRED:
        translation = translate(Occurrence(spelling))
        if translation is not None:
            return Answer((spelling,), "translated", reason=translation.warning.partition(": ")[2])
    if spelling in ACCEPTED_FLAGS:
        return Answer((spelling,), "accepted without effect", reason=ACCEPTED_FLAGS[spelling])
    refused = (REFUSED | REFUSED_FLAGS).get(spelling)
    return None if refused is None else Answer((spelling,), "refused", reason=refused)


def answers() -> Iterator[Answer]:
    """Yields the answer of each known flag."""
    yield from map(answer_of, flag_table().values())
    for spelling in (*sorted(RETIRED), *ACCEPTED_FLAGS, *(REFUSED | REFUSED_FLAGS)):
        answer = answer_without_field(spelling)
        assert answer is not None
        yield answer
