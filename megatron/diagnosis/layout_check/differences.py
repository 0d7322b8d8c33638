"""Compares what ranks recorded with what one process recorded, and finds the first difference."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.diagnosis.layout_check.layout_trace import FORWARD, GRADIENT, INITIAL, NORM, WEIGHT, LayoutTrace

_ORDER = (INITIAL, FORWARD, GRADIENT, NORM, WEIGHT)

_NOTHING = 1e-7
"""A tensor whose values are all smaller counts as zero with rounding errors; it has no relative error."""


@dataclass(frozen=True)
class Difference:
    """A value that differs under a layout."""

    kind: str
    name: str
    ranks: tuple[int, ...]
    """The ranks on which it differs."""
    error: float
    """Largest difference over the largest value; infinite where something is missing or not finite."""
    where: str
    """The place of the largest difference."""


def differences(
    reference: LayoutTrace, ranks: Sequence[LayoutTrace], tolerance: float, of: str = "one process"
) -> list[Difference]:
    """Returns everything that differs by more than `tolerance`, in the order in which a run computes it: initial
    weights, the forward pass from the embedding on, gradients from the loss back, their norm, weights at the end.
    Initial weights must be bit-equal. `of` names the reference in messages."""
    found = []
    for kind, name in _in_order(reference, ranks):
        far: dict[int, tuple[float, str]] = {}
        allowed = 0.0 if kind == INITIAL else tolerance
        for rank, seen in enumerate(ranks):
            if (kind, name) in seen.found:
                error, where = _error(kind, reference.found.get((kind, name)), seen.found[kind, name], of)
                if not error <= allowed:
                    far[rank] = error, where
        missing = _missing(kind, reference.found.get((kind, name)), [seen.found.get((kind, name)) for seen in ranks])
        if far:
            worst = max(far, key=lambda rank: far[rank][0])
            found.append(Difference(kind, name, tuple(far), *far[worst]))
        elif missing is not None:
            found.append(Difference(kind, name, tuple(range(len(ranks))), float("inf"), missing))
    return found


def _in_order(reference: LayoutTrace, ranks: Sequence[LayoutTrace]) -> Iterator[tuple[str, str]]:
    keys = dict.fromkeys([*reference.found, *(key for seen in ranks for key in seen.found)])
    # Initial weights are recorded in the order in which the model has its parameters.
    order_in_model = {name: place for place, (kind, name) in enumerate(keys) if kind == INITIAL}
    for kind in _ORDER:
        of_kind = [key for key in keys if key[0] == kind]
        yield from sorted(of_kind, key=lambda key: -order_in_model.get(key[1], -1)) if kind == GRADIENT else of_kind


def _error(
    kind: str, expected: tuple[Tensor, Tensor] | None, seen: tuple[Tensor, Tensor], name: str
) -> tuple[float, str]:
    """Returns the largest difference over the largest expected value, and its place."""
    places, values = seen
    if not places.numel():
        return 0.0, ""
    if expected is None:
        return float("inf"), f"{name} has no such value"
    rows = _rows_of(places, expected[0])
    if rows is None:
        return float("inf"), f"at places that {name} does not have"
    wanted = expected[1][rows]
    if wanted.shape != values.shape:
        return float("inf"), f"shape {list(values.shape)} instead of {list(wanted.shape)}"
    apart = (
        (values.double() - wanted.double()).abs().flatten(1) if values.dim() > 1 else (values - wanted).abs()[:, None]
    )
    if not torch.isfinite(values).all():
        return float("inf"), "not finite"
    by_row = apart.amax(1)
    worst = int(by_row.argmax())
    scale = max(float(expected[1].abs().max()), _NOTHING)
    what = {FORWARD: "token", NORM: "step"}.get(kind, "element")
    return float(by_row[worst]) / scale, f"{what} {int(places[worst])} most"


def _rows_of(places: Tensor, known: Tensor) -> Tensor | None:
    """Returns the rows of a list of known places at which these places are; None if one is not known."""
    order = known.argsort()
    at = torch.searchsorted(known[order], places).clamp(max=known.numel() - 1)
    rows = order[at]
    return rows if torch.equal(known[rows], places) else None


def _missing(
    kind: str, expected: tuple[Tensor, Tensor] | None, seen: Sequence[tuple[Tensor, Tensor] | None]
) -> str | None:
    """Returns how many places of a value of one process are on no rank; None if all are on some rank."""
    if expected is None:
        return None
    present = [pair[0] for pair in seen if pair is not None]
    found = torch.cat(present) if present else expected[0][:0]
    absent = int((~torch.isin(expected[0], found)).sum())
    return f"{absent} of {expected[0].numel()} places are on no rank" if absent else None


def report(
    found: Sequence[Difference], coordinates: Mapping[int, Mapping[str, int]], compared: int, tolerance: float
) -> Iterator[str]:
    """Yields the report: that all is equal, or the first difference, the ranks that have it, and how far it spreads."""
    if not found:
        yield f"equal: {compared} values compared, none differs by more than {tolerance:.0e} of its largest value"
        return
    first = found[0]
    yield (
        f"DIFFERENT: the first is the {first.kind} of {first.name}"
        if first.kind != FORWARD
        else (f"DIFFERENT: the first is in the forward pass: {first.name}")
    )
    yield f"  by {first.error:.1e} of its largest value; {first.where}"
    for rank in first.ranks:
        axes = ", ".join(f"{axis} {place}" for axis, place in coordinates.get(rank, {}).items())
        yield f"  on rank {rank} ({axes})"
    for kind in _ORDER:
        names = [difference.name for difference in found if difference.kind == kind]
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            yield f"  all in all, {kind}: {shown}"
