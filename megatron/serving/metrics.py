"""Counters of a server, in the text form that Prometheus reads."""

from collections import Counter
from collections.abc import Callable

_PREFIX = "megatron_serving_"


class Metrics:
    """Counters that only grow, by their labels, and gauges that are asked when they are read."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter[str]] = {}
        self._gauges: dict[str, Callable[[], float]] = {}
        self._help: dict[str, str] = {}

    def counter(self, name: str, about: str) -> None:
        """Declares a counter."""
        self._counters[name], self._help[name] = Counter(), about

    def gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Declares a gauge, whose value `read` returns."""
        self._gauges[name], self._help[name] = read, about

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Adds to a counter. Labels have few values each, such as exit codes: every combination is kept."""
        written = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        self._counters[name][f"{{{written}}}" if written else ""] += value  # type: ignore[assignment]

    def value(self, name: str) -> float:
        """Returns a counter, summed over its labels."""
        return sum(self._counters[name].values())

    def text(self) -> str:
        """Returns all values, in Prometheus's text format 0.0.4."""
        lines = []
        for name, counter in self._counters.items():
            lines += self._head(name, "counter")
            lines += [f"{_PREFIX}{name}{labels} {value:g}" for labels, value in (counter or {"": 0}).items()]
        for name, read in self._gauges.items():
            lines += [*self._head(name, "gauge"), f"{_PREFIX}{name} {read():g}"]
        return "\n".join(lines) + "\n"

    def _head(self, name: str, kind: str) -> list[str]:
        return [f"# HELP {_PREFIX}{name} {self._help[name]}", f"# TYPE {_PREFIX}{name} {kind}"]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
