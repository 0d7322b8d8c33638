"""The answer of a gate: an outcome, the reason, and the figures that it rests on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.core.utils.files import write_atomically

Figure = int | float | str | None


class Outcome(Enum):
    """What a gate says."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNSURE = "UNSURE"


EXIT_CODES = {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.UNSURE: 3}
"""Exit codes of tools/validate.py. 2 is bad input."""


@dataclass(frozen=True)
class Verdict:
    """The verdict of one gate."""

    gate: str
    outcome: Outcome
    reason: str
    """One sentence."""
    kinds: tuple[str, ...] = ()
    """Names of the faults; several if the data cannot tell them apart."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Measured values and limits by name; units are in the names."""
    steps: Sequence[int] = ()
    """Steps that the reason is about, such as those of spikes."""

    @property
    def exit_code(self) -> int:
        """Exit code of the tool."""
        return EXIT_CODES[self.outcome]

    @property
    def line(self) -> str:
        """The verdict in one line."""
        named = f" [{' or '.join(self.kinds)}]" if self.kinds else ""
        return f"{self.outcome.value} {self.gate}{named}: {self.reason}"

    def write(self, path: Path) -> None:
        """Writes the verdict as JSON. Raises UserError if the file cannot be written."""
        content = {
            "gate": self.gate,
            "outcome": self.outcome.value,
            "exit_code": self.exit_code,
            "kinds": list(self.kinds),
            "reason": self.reason,
            "figures": dict(self.figures),
            "steps": list(self.steps),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(f"--json {path} cannot be written: {error.strerror or error}") from None
