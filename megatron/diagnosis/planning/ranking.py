"""Chooses among layouts: rough costs order thousands of them, exact ones decide among the best."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.layouts import MAX_BUBBLE, Layout, Space, possible_layouts
from megatron.diagnosis.planning.rough_cost import RoughCost

_SLACK = 1.25
"""A layout whose rough memory is above the limit by more than this is not computed exactly."""
_EXACT_SECONDS = 30.0
_DIVISIONS, _VARIANTS, _LEADING = 12, 3, 4
"""Divisions (TP, PP, CP, EP) that are computed exactly, variants of each, and divisions with further variants."""

_EQUAL = 0.02


@dataclass(frozen=True)
class ExactCost:
    """Memory and time of a layout, from the run's own config."""

    memory: int
    """Bytes of the rank that needs most, with the CUDA context."""
    seconds: float
    """Of a step."""
    mfu: float
    """Model FLOPs utilisation, from 0 to 1."""
    error: float = 0.0
    """Expected relative error of the time."""
    bubble: float = 0.0
    """Part of the step that pipeline ranks wait, by the simulated schedule."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    cost: ExactCost


@dataclass(frozen=True)
class Loser:
    """A layout that was not chosen, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True)
class Ranking:
    """The layouts that fit, from the fastest, and the others."""

    best: tuple[Candidate, ...]
    losers: tuple[Loser, ...]
    considered: int
    """Layouts that the rules allow."""
    too_large: int
    """Those of them that need too much memory, by the rough count."""
    least_memory: float = 0.0
    """Rough bytes of the layout that needs least."""


def rank_layouts(
    space: Space, rough: RoughCost, exact: Callable[[Layout], ExactCost], limit: float, wanted: int = 5
) -> Ranking:
    """Ranks all layouts by the time of a step, among those whose peak memory is at most `limit` bytes. ZeRO stage 1
    comes first; 2 and 3 are only tried if nothing else fits. Raises UserError from `exact` for a model that cannot be
    built at all."""
    given = space.specification.zero_stage
    for stages in [(given,)] if given is not None else [(1,), (2,), (3,)]:
        layouts = [_without_shards(layout) for layout in possible_layouts(space, stages)]
        ranking = _rank(layouts, space, rough, exact, limit, wanted)
        if ranking.best or not layouts:
            break
    return ranking


def _without_shards(layout: Layout) -> Layout:
    """Returns the layout with ZeRO stage 0 if there is one replica, which has nobody to share state with."""
    if layout.data * layout.context > 1 or layout.zero == 0:
        return layout
    return Layout(**{**layout.__dict__, "zero": 0})


def _rank(
    layouts: Sequence[Layout],
    space: Space,
    rough: RoughCost,
    exact: Callable[[Layout], ExactCost],
    limit: float,
    wanted: int,
) -> Ranking:
    memory = {layout: rough.memory(layout) for layout in layouts}
    seconds = {layout: rough.seconds(layout) for layout in layouts if memory[layout] <= limit * _SLACK}
    search = _Search(exact, limit)
    order = sorted(seconds, key=lambda layout: (seconds[layout], layout))
    firsts: dict[tuple[int, ...], list[Layout]] = {}
    for layout in order:
        firsts.setdefault((layout.tensor, layout.pipeline, layout.context, layout.expert), []).append(layout)
    for variants in firsts.values():  # the best variant of each division that fits
        search.first_that_fits(variants[:_VARIANTS], _DIVISIONS)
    leading = [c.layout for c in sorted(search.fitting, key=lambda c: c.cost.seconds)[:_LEADING]]
    for first in leading:  # further variants of the best divisions
        variants = firsts[first.tensor, first.pipeline, first.context, first.expert]
        for layout in [v for v in variants if v not in search.seen][:_VARIANTS]:
            search.compute(layout)
    best, losers = search.fitting, search.losers
    best = _simplest_of_equals(best)
    if best:
        losers += [Loser(c.layout, slower(c.cost.seconds, best[0].cost.seconds)) for c in best[wanted:]]
        losers += _by_axis(best, layouts, memory, seconds, space, limit)
    too_large = sum(1 for layout in layouts if layout not in seconds)
    least = min(memory.values(), default=0.0)
    return Ranking(tuple(best[:wanted]), tuple(losers), len(layouts), too_large, least)


class _Search:
    """Computes layouts exactly, for a limited time."""

    def __init__(self, exact: Callable[[Layout], ExactCost], limit: float) -> None:
        self._exact, self._limit, self._started = exact, limit, time.monotonic()
        self.fitting: list[Candidate] = []
        self.losers: list[Loser] = []
        self.seen: set[Layout] = set()

    def first_that_fits(self, variants: Iterable[Layout], most: int) -> None:
        """Computes variants of one division until one fits, unless `most` layouts fit already."""
        for layout in variants:
            if len(self.fitting) >= most or self.compute(layout):
                return

    def compute(self, layout: Layout) -> bool:
        """Computes a layout, if there is time. Returns whether it fits."""
        if self.fitting and time.monotonic() - self._started > _EXACT_SECONDS:
            return False
        self.seen.add(layout)
        try:
            cost = self._exact(layout)
        except UserError as error:
            self.losers.append(Loser(layout, f"refused: {str(error).splitlines()[0]}"))
            return False
        if cost.memory > self._limit:
            self.losers.append(Loser(layout, f"needs {cost.memory / 1e9:.1f} GB of {self._limit / 1e9:.1f}"))
            return False
        self.fitting.append(Candidate(layout, cost))
        return True


def _simplest_of_equals(found: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates from the fastest, but the simplest first among those within 2% of it: predicted times
    are no better than that, and fewer stages and chunks have fewer ways to be slow."""
    by_time = sorted(found, key=lambda candidate: candidate.cost.seconds)
    equal = [c for c in by_time if c.cost.seconds <= by_time[0].cost.seconds * (1 + _EQUAL)]

    def parts(candidate: Candidate) -> tuple[int, int, float]:
        layout = candidate.layout
        split = layout.tensor * layout.pipeline * layout.context * layout.expert
        return split, layout.virtual, candidate.cost.seconds

    simplest = min(equal, key=parts, default=None)
    return [*([simplest] if simplest else []), *(c for c in by_time if c is not simplest)]


def slower(seconds: float, best: float) -> str:
    """Returns why a layout of `seconds` lost to one of `best` seconds."""
    return f"{100 * (seconds / best - 1):.1f}% slower" if seconds >= best else "as fast within 2%, and split further"


def _by_axis(
    best: Sequence[Candidate],
    layouts: Iterable[Layout],
    memory: dict[Layout, float],
    seconds: dict[Layout, float],
    space: Space,
    limit: float,
) -> Iterator[Loser]:
    """Yields, for each other value of each parallel size, the best layout that has it, and why it lost to the first."""
    winner = best[0].layout
    known = {candidate.layout for candidate in best}
    for axis in ("tensor", "pipeline", "context", "expert", "virtual", "micro_batch", "recompute"):
        groups: dict[int | str, list[Layout]] = {}
        for layout in layouts:
            if (value := getattr(layout, axis)) != getattr(winner, axis):
                groups.setdefault(value, []).append(layout)
        for group in groups.values():
            fitting = [layout for layout in group if memory[layout] <= limit]
            if not fitting:
                least = min(group, key=lambda layout: memory[layout])
                yield Loser(least, f"needs about {memory[least] / 1e9:.0f} GB of {limit / 1e9:.0f}")
                continue
            fastest = min(fitting, key=lambda layout: seconds[layout])
            if fastest in known:
                continue
            bubble = fastest.bubble(space.global_batch_size)
            waits = f", {bubble:.0%} of them the pipeline's bubble" if bubble > MAX_BUBBLE else ""
            slower = seconds[fastest] / seconds[winner] - 1
            yield Loser(fastest, f"about {max(slower, 0):.0%} slower by the rough count{waits}")
