"""How each flag of Megatron-LM is answered: what --help and docs/flags.md say of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import value_text
from megatron.training.config.conditions import is_inert, is_to_come, needs_of
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.retired import REFUSED, RETIRED, Occurrence, translate
from megatron.training.config.unsupported_flags import ACCEPTED_FLAGS, REFUSED_FLAGS, refusal_of

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
