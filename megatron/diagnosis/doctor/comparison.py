"""Compares the ranks of a run: what differs between them, whose clock is wrong, who is slow."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.diagnosis.doctor.findings import Finding, Section

SLOW = 0.8
"""A rate below this part of the median is slow."""
_CLOCKS = 2.0
"""Seconds by which clocks may differ: their files and logs are then still in order."""
_NAMED = 4


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others."""

    host: str
    sections: tuple[Section, ...]


def differences(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Yields a finding for each fact that must be the same on all ranks and is not. It names the values, the ranks and
    their hosts; the value of the fewest ranks comes first."""
    names = {(section.title, fact.name): fact for one in reports for section in one.sections for fact in section.facts}
    for (title, name), fact in names.items():
        if fact.if_different is None:
            continue
        holders: dict[str, list[int]] = {}
        for rank, one in enumerate(reports):
            holders.setdefault(_text_of(one, title, name), []).append(rank)
        if len(holders) > 1:
            rarest = sorted(holders.items(), key=lambda holder: len(holder[1]))
            told = " and ".join(f"{text} on {named(ranks, reports)}" for text, ranks in rarest[:_NAMED])
            yield Finding(fact.if_different, f"{name} is {told}: make all ranks alike")


def _text_of(report: RankReport, title: str, name: str) -> str:
    facts = (fact for section in report.sections if section.title == title for fact in section.facts)
    return next((fact.text for fact in facts if fact.name == name), "not set")


def named(ranks: Sequence[int], reports: Sequence[RankReport]) -> str:
    """Returns ranks with their hosts, for messages."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(reports[rank].host, []).append(rank)
    parts = [f"rank{'s' * (len(some) > 1)} {_numbers(some)} ({host})" for host, some in by_host.items()]
    more = f" and {len(parts) - _NAMED} more hosts" if len(parts) > _NAMED else ""
    return ", ".join(parts[:_NAMED]) + more


def _numbers(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def shared_findings(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Yields the findings of all ranks, each text once with the ranks that have it."""
    holders: dict[Finding, list[int]] = {}
    for rank, one in enumerate(reports):
        for section in one.sections:
            for finding in section.findings:
                holders.setdefault(finding, []).append(rank)
    for finding, ranks in holders.items():
        where = (
            "" if len(reports) == 1 else f"{named(ranks, reports)}: " if len(ranks) < len(reports) else "all ranks: "
        )
        yield Finding(finding.level, where + finding.text)


def wrong_clocks(times: Sequence[float], reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Yields a finding for each host whose clock differs from the median. `times` are the seconds that each rank read
    at about the same moment."""
    middle = statistics.median_low(times)
    by_host = {reports[rank].host: time - middle for rank, time in enumerate(times) if abs(time - middle) > _CLOCKS}
    for host, difference in by_host.items():
        way = "ahead of" if difference > 0 else "behind"
        yield Finding(
            "warning", f"the clock of {host} is {abs(difference):,.1f} s {way} the others: start its time service"
        )


def slow_ranks(what: str, unit: str, rates: Sequence[float | None], reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Yields a finding for each rank whose rate is low beside the others."""
    known = [rate for rate in rates if rate is not None]
    middle = statistics.median_high(known) if known else 0.0
    for rank, rate in enumerate(rates):
        if rate is not None and rate < SLOW * middle:
            yield Finding(
                "warning",
                f"{named([rank], reports)} is slow: {what} {rate:,.3g} {unit}, the median is {middle:,.3g}; all ranks "
                "wait for the slowest",
            )


def slow_links(
    rates: Mapping[tuple[int, int], float], kinds: Mapping[tuple[int, int], str], reports: Sequence[RankReport]
) -> Iterator[Finding]:
    """Yields a finding for each pair of ranks whose link is slow beside others of its kind (`kinds`: within a host, or
    between hosts)."""
    for kind in dict.fromkeys(kinds.values()):
        of_kind = {pair: rate for pair, rate in rates.items() if kinds[pair] == kind}
        middle = statistics.median_high(of_kind.values())
        for pair, rate in of_kind.items():
            if rate < SLOW * middle:
                yield Finding(
                    "warning",
                    f"the link between {named([pair[0]], reports)} and {named([pair[1]], reports)} is slow: "
                    f"{rate / 1e9:,.3g} GB/s each way, the median {kind} is {middle / 1e9:,.3g}",
                )
