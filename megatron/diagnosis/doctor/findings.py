"""What the doctor notes: facts about a process and its machine, and findings that are wrong or doubtful."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["fault", "warning"]
"""A fault stops or breaks a run, or makes it wrong; a warning makes it slow, or may stop it later."""


@dataclass(frozen=True)
class Fact:
    """Something about a process or its machine."""

    name: str
    text: str
    """Value as the report shows it; equal texts are equal values."""
    if_different: Level | None = None
    """How it counts if ranks differ; None: they may differ."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong or doubtful."""

    level: Level
    text: str
    """One sentence: what was found, and what would help."""


@dataclass
class Section:
    """A part of the examination."""

    title: str
    facts: list[Fact] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""

    def add(self, name: str, text: object, if_different: Level | None = None) -> None:
        """Adds a fact."""
        self.facts.append(Fact(name, str(text), if_different))

    def fault(self, text: str) -> None:
        """Adds a fault."""
        self.findings.append(Finding("fault", text))

    def warn(self, text: str) -> None:
        """Adds a warning."""
        self.findings.append(Finding("warning", text))

    def as_json(self) -> dict[str, object]:
        """Returns the section for other ranks."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "Section":
        """Returns the section of another rank."""
        facts, findings = [Fact(**one) for one in told["facts"]], [Finding(**one) for one in told["findings"]]
        return cls(told["title"], facts, findings, list(told["unseen"]))


def size_text(nbytes: float) -> str:
    """Returns a number of bytes for people."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes / 1024:.1f} KiB"
