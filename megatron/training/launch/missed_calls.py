"""Compares what ranks report of their communication: which ranks have missed which collective.

A report has `waits`, the calls that the rank's threads wait for, each [name, ranks, number, operation]; and `counts`,
[name, ranks, number] of each channel of `megatron.core.utils.activity`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]


@dataclass(frozen=True)
class MissedCall:
    """A collective (or message) in which some ranks wait."""

    operation: str
    number: int
    """Number of the call among those of its ranks, from 1."""
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    """Ranks that have not joined. A rank without a report is among them if it has failed."""


def missed_calls(reports: Mapping[int, Report], failed: int | None = None) -> list[MissedCall]:
    """Returns the calls in which ranks wait, those of the largest groups first. `failed` is the rank that has
    failed."""
    waiting: dict[tuple[str, tuple[int, ...], int, str], list[int]] = {}
    for rank, report in sorted(reports.items()):
        for name, ranks, number, operation in report["waits"]:
            waiting.setdefault((name, tuple(ranks), number, operation), []).append(rank)
    counts = {
        rank: {(name, tuple(ranks)): number for name, ranks, number in report["counts"]}
        for rank, report in reports.items()
    }
    found = []
    for (name, ranks, number, operation), waiters in waiting.items():
        if not ranks:
            continue  # the rank waits for its own device
        behind = [rank for rank in ranks if rank in counts and counts[rank].get((name, ranks), 0) < number]
        silent = [failed] if failed in ranks and failed not in counts and failed is not None else []
        found.append(MissedCall(operation, number, ranks, tuple(waiters), tuple(sorted({*behind, *silent}))))
    return sorted(found, key=lambda call: (-len(call.ranks), -len(call.waiting), call.ranks, call.number))


def ranks_behind(reports: Mapping[int, Report]) -> list[int]:
    """Returns the ranks that have not joined a call in which others wait."""
    return sorted({rank for call in missed_calls(reports) for rank in call.absent})


def named_ranks(ranks: Iterable[int], most: int = 16) -> str:
    """Returns the ranks as a text: "rank 3", "ranks 0, 1 and 3", "ranks 0, 1, ... (64 in all)"."""
    words = [str(rank) for rank in ranks]
    if len(words) > most:
        return f"ranks {', '.join(words[:4])}, ... ({len(words)} in all)"
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}" if words else "no rank"
