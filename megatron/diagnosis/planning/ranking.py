"""Chooses among layouts: rough costs order thousands of them, exact ones decide among the best."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.layouts import MAX_BUBBLE, RECOMPUTES, Layout, Space, possible_layouts
from megatron.diagnosis.planning.rough_cost import RoughCost

_SLACK = 1.15
"""A layout whose rough memory is above the limit by more than this is not computed exactly."""

_DIVISIONS, _VARIANTS, _LEADING = 10, 2, 3
"""Divisions (TP, PP, CP, EP) whose time is computed exactly, variants of each, and divisions with further variants.
Numbers, not seconds: the same specification gives the same plan on any machine."""

_EQUAL = 0.02


@dataclass(frozen=True)
class ExactTime:
    """Time of a step of a layout, from the run's own config."""

    seconds: float
    mfu: float
    """Model FLOPs utilisation, from 0 to 1."""
    error: float = 0.0
    """Expected relative error of the time."""
    bubble: float = 0.0
    """Part of the step that pipeline ranks wait, by the simulated schedule."""


class Exact(Protocol):
    """Computes costs of a layout from the config of its run. Raises UserError if the run would refuse it."""

    def time(self, layout: Layout) -> ExactTime:
        """Returns the time of a step."""
        ...

    def memory(self, layout: Layout) -> int:
        """Returns the bytes of the rank that needs most, with the CUDA context."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    time: ExactTime
    memory: int
    """Bytes of the rank that needs most."""

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.time.seconds


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


def rank_layouts(space: Space, rough: RoughCost, exact: Exact, limit: float, wanted: int = 3) -> Ranking:
    """Ranks all layouts by the time of a step, among those whose peak memory is at most `limit` bytes. ZeRO stage 1
    comes first; 2 and 3 are only tried if nothing else fits."""
    given = space.specification.zero_stage
    ranking = Ranking((), (), 0, 0)
    for stages in [(given,)] if given is not None else [(1,), (2,), (3,)]:
        layouts = [_without_shards(layout) for layout in possible_layouts(space, stages)]
        ranking = _Search(layouts, space, rough, exact, limit).run(wanted)
        if ranking.best or not layouts:
            break
    return ranking


def _without_shards(layout: Layout) -> Layout:
    """Returns the layout with ZeRO stage 0 if there is one replica, which has nobody to share state with."""
    return layout if layout.data * layout.context > 1 else replace(layout, zero=0)


class _Search:
    """One search: rough costs of all layouts, exact times of the best, exact memory from the fastest on."""

    def __init__(self, layouts: Sequence[Layout], space: Space, rough: RoughCost, exact: Exact, limit: float) -> None:
        self._layouts, self._space, self._exact, self._limit = layouts, space, exact, limit
        self._memory = {layout: rough.memory(layout) for layout in layouts}
        self._seconds = {layout: rough.seconds(layout) for layout in layouts if self._memory[layout] <= limit * _SLACK}
        self._times: dict[Layout, ExactTime] = {}
        self._lost: dict[Layout, str] = {}
        self._ratio = 1.0
        """Exact memory over the rough one, as found so far."""

    def run(self, wanted: int) -> Ranking:
        """Returns the ranking with up to `wanted` layouts that fit."""
        self._compute_times()
        best = self._that_fit(wanted)
        if best:
            first = best[0]
            self._lost |= {
                layout: slower(time.seconds, first.seconds)
                for layout, time in self._times.items()
                if layout not in self._lost and layout not in {found.layout for found in best}
            }
            self._lost |= {layout: reason for layout, reason in self._by_axis(best) if layout not in self._lost}
        too_large = len(self._layouts) - len(self._seconds)
        losers = tuple(Loser(layout, reason) for layout, reason in self._lost.items())
        least = min(self._memory.values(), default=0.0)
        return Ranking(tuple(best), losers, len(self._layouts), too_large, least)

    def _compute_times(self) -> None:
        """Computes the time of the best variants of each division, then of further variants of the best divisions."""
        divisions: dict[tuple[int, ...], list[Layout]] = {}
        for layout in sorted(self._seconds, key=lambda layout: (self._seconds[layout], layout)):
            axes = (layout.tensor, layout.pipeline, layout.context, layout.expert)
            divisions.setdefault(axes, []).append(layout)
        firsts = list(divisions.values())[:_DIVISIONS]
        for variants in firsts:
            for layout in variants[:_VARIANTS]:
                if self._time(layout) and self._memory[layout] <= self._limit * 0.95:
                    break
        for variants in sorted(firsts, key=lambda found: min(map(self._known, found)))[:_LEADING]:
            further = [layout for layout in variants if layout not in self._times and layout not in self._lost]
            for layout in further[:_VARIANTS]:
                self._time(layout)

    def _known(self, layout: Layout) -> float:
        return self._times[layout].seconds if layout in self._times else math.inf

    def _time(self, layout: Layout) -> bool:
        """Computes the time of a layout. Returns whether the run accepts it."""
        try:
            self._times[layout] = self._exact.time(layout)
        except UserError as error:
            self._lost[layout] = f"refused: {str(error).splitlines()[0]}"
        return layout in self._times

    def _that_fit(self, wanted: int) -> list[Candidate]:
        """Computes the memory of layouts until `wanted` of them fit: from the fastest on, but of those within 2% of it
        the simplest first. Predicted times are no better than that, and fewer stages have fewer ways to be slow."""
        left = dict(self._times)
        found: list[Candidate] = []
        while left and len(found) < wanted:
            fastest = min(timed.seconds for timed in left.values())
            layout = min((each for each in left if left[each].seconds <= fastest * (1 + _EQUAL)), key=self._parts)
            timed, expected = left.pop(layout), self._memory[layout] * self._ratio
            if expected > 1.1 * self._limit:
                self._lost[layout] = f"needs about {expected / 1e9:.0f} GB of {self._limit / 1e9:.0f}"
                continue
            try:
                memory = self._exact.memory(layout)
            except UserError as error:
                self._lost[layout] = f"refused: {str(error).splitlines()[0]}"
                continue
            self._ratio = memory / self._memory[layout]
            if memory > self._limit:
                self._lost[layout] = f"needs {memory / 1e9:.1f} GB of {self._limit / 1e9:.1f}"
            else:
                found.append(Candidate(layout, timed, memory))
        return found

    def _parts(self, layout: Layout) -> tuple[int, int, int, float]:
        """Returns how much a layout splits and recomputes."""
        split = layout.tensor * layout.pipeline * layout.context * layout.expert
        return split, layout.virtual, RECOMPUTES.index(layout.recompute), self._times[layout].seconds

    def _by_axis(self, best: Sequence[Candidate]) -> Iterator[tuple[Layout, str]]:
        """Yields, for each other value of each axis, the best layout that has it, and why it lost to the first."""
        winner, known = best[0].layout, {candidate.layout for candidate in best}
        for axis in ("tensor", "pipeline", "context", "expert", "recompute"):
            groups: dict[int | str, list[Layout]] = {}
            for layout in self._layouts:
                if (value := getattr(layout, axis)) != getattr(winner, axis):
                    groups.setdefault(value, []).append(layout)
            for group in groups.values():
                fitting = [layout for layout in group if self._memory[layout] <= self._limit]
                if not fitting:
                    least = min(group, key=lambda layout: self._memory[layout])
                    yield least, f"needs about {self._memory[least] / 1e9:.0f} GB of {self._limit / 1e9:.0f}"
                    continue
                fastest = min(fitting, key=lambda layout: self._seconds[layout])
                if fastest not in known and fastest not in self._times:
                    bubble = fastest.bubble(self._space.global_batch_size)
                    waits = f"; the pipeline waits {bubble:.0%} of a step" if bubble > MAX_BUBBLE else ""
                    more = self._seconds[fastest] / self._seconds[winner] - 1
                    yield fastest, f"about {max(more, 0):.0%} slower by the rough count{waits}"


def slower(seconds: float, best: float) -> str:
    """Returns why a layout of `seconds` lost to one of `best` seconds."""
    return f"{100 * (seconds / best - 1):.1f}% slower" if seconds >= best else "as fast within 2%, and split further"
