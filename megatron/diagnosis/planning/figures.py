"""A predicted or measured number with its source and its error."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Figure:
    """A number, what it rests on, and its relative error."""

    value: float
    source: str
    error: float = 0.0
    """The true value is expected within this fraction of `value`."""

    def times(self, factor: float) -> "Figure":
        """Returns the figure times an exact number."""
        return replace(self, value=self.value * factor)

    def per(self, work: float) -> "Figure":
        """Returns the seconds of `work` at this rate."""
        return replace(self, value=work / self.value)

    def text(self) -> str:
        """Returns the error and the source for a line of a report."""
        return f"+-{self.error:.0%}; {self.source}"


def total(figures: Iterable[Figure]) -> Figure:
    """Returns the sum of figures. Their errors add up, as if all had the same sign; the sources are those of the parts,
    the largest part first."""
    parts = sorted((each for each in figures if each.value), key=lambda each: -each.value)
    value = sum(each.value for each in parts)
    error = sum(each.value * each.error for each in parts) / value if value else 0.0
    sources = dict.fromkeys(source for each in parts for source in each.source.split("; "))
    return Figure(value, "; ".join(sources), error)
