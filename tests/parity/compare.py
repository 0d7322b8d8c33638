"""Compares the records of a cell's ranks with those of one process."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from parity.evidence import Evidence, Masks, Step, TensorSlice, relative
from torch import Tensor

TOLERANCE = 1e-11
"""Largest relative error allowed in float64."""


@dataclass
class Verdict:
    """Differences between a cell and one process."""

    errors: dict[str, float] = field(default_factory=dict)
    """Largest relative error of each kind (loss, gradient, norm, weights, ...)."""
    where: dict[str, str] = field(default_factory=dict)
    """Parameter and step with the largest error of each kind."""
    problems: list[str] = field(default_factory=list)
    """Values that should be bit-equal and are not, and values that are missing."""

    def note(self, kind: str, error: float, where: str) -> None:
        """Keeps the larger of this error and the known one of its kind. NaN counts as infinity."""
        error = math.inf if math.isnan(error) else error
        if error > self.errors.get(kind, 0.0):
            self.errors[kind], self.where[kind] = error, where

    def beyond(self, tolerance: float) -> list[str]:
        """Returns a line for each problem and for each error above the tolerance; empty if the cell is right."""
        far = [f"{kind}: error {e:.1e} in {self.where[kind]}" for kind, e in self.errors.items() if not e <= tolerance]
        return self.problems + far

    @property
    def largest(self) -> float:
        return max(self.errors.values(), default=0.0)


def judge(reference: Evidence, ranks: list[Evidence], to_the_bit: bool = True) -> Verdict:
    """Compares all records of the ranks with the reference.

    With `to_the_bit` initial values and dropout masks must be bit-equal; that needs the same number formats.
    """
    verdict = Verdict()
    if to_the_bit:
        verdict.problems += _unequal_starts(reference, ranks)
        verdict.problems += _unequal_masks(reference.masks, [rank.masks for rank in ranks])
    for number, expected in enumerate(reference.steps):
        steps = [rank.steps[number] for rank in ranks]
        verdict.problems += _unequal_replicas(f"gradient of step {number}", [step.gradients for step in steps])
        _compare_losses(verdict, number, expected.losses, [(r.context, r.steps[number].losses) for r in ranks])
        for step in steps:
            verdict.note("norm", abs(step.norm - expected.norm) / max(expected.norm, 1e-300), f"step {number}")
        _compare_reports(verdict, number, [expected], steps)
        _compare_slices(verdict, "gradient", f"step {number}", expected.gradients, [s.gradients for s in steps])
    verdict.problems += _unequal_replicas("weight", [rank.weights for rank in ranks])
    _compare_slices(verdict, "weights", "the end", reference.weights, [rank.weights for rank in ranks])
    for rank in ranks:
        error = abs(rank.norm_of_ones / reference.norm_of_ones - 1)
        verdict.note("norm of ones", error, f"{rank.norm_of_ones**2:.3f} of {reference.norm_of_ones**2:.0f} elements")
    return verdict


def _unequal_starts(reference: Evidence, ranks: list[Evidence]) -> Iterator[str]:
    whole = assemble(reference.initial)
    for number, rank in enumerate(ranks):
        for tensor_slice in rank.initial:
            if tensor_slice.name not in whole or not torch.equal(
                tensor_slice.values.double(), tensor_slice.of(whole[tensor_slice.name].values)
            ):
                yield f"initial value of {tensor_slice.name} on rank {number} differs"
    yield from _missing(
        "initial value", whole, assemble(tensor_slice for rank in ranks for tensor_slice in rank.initial)
    )


def _unequal_masks(reference: Masks, ranks: list[Masks]) -> Iterator[str]:
    """Reports rows of masks that differ from those of one process, rows only the ranks drew, and rows no rank drew."""
    known = {identity for masks in ranks for identity in masks.rows}
    different = {
        identity
        for masks in ranks
        for identity, drawn in masks.rows.items()
        if identity in reference.rows and not _agree(drawn, reference.rows[identity])
    }
    for text, rows in (
        ("differ", different),
        ("are of no token of the batch", known - reference.rows.keys()),
        ("were never drawn", reference.rows.keys() - known),
    ):
        if rows:
            yield f"{len(rows)} rows of dropout masks {text}, such as {min(rows)}"


def _agree(drawn: list[tuple[int, bytes]], expected: list[tuple[int, bytes]]) -> bool:
    """Tells whether two lists of column ranges of one row have the same bits where they overlap."""
    for first, row in drawn:
        for other, wanted in expected:
            begin, end = max(first, other), min(first + len(row), other + len(wanted))
            if row[begin - first : max(end, begin) - first] != wanted[begin - other : max(end, begin) - other]:
                return False
    return True


def _unequal_replicas(what: str, ranks: list[list[TensorSlice]]) -> Iterator[str]:
    seen: dict[object, tuple[int, Tensor]] = {}
    for number, rank in enumerate(ranks):
        for tensor_slice in rank:
            first, values = seen.setdefault(tensor_slice.place, (number, tensor_slice.values))
            if not torch.equal(values, tensor_slice.values):
                yield f"{what} {tensor_slice.name} {tensor_slice.box}: ranks {first} and {number} differ"


def _compare_losses(
    verdict: Verdict, number: int, expected: dict[int, Tensor], ranks: list[tuple[int, dict[int, Tensor]]]
) -> None:
    """Compares loss sums and token counts of micro-batches.

    The parts of context parallel ranks are added up; all other ranks with a loss must have the same one.
    """
    parts: dict[tuple[int, int], Tensor] = {}
    for context, losses in ranks:
        for first, part in losses.items():
            known = parts.setdefault((first, context), part)
            if not torch.equal(known, part):
                verdict.problems.append(f"loss of sample {first} in step {number} differs between ranks")
    totals: dict[int, Tensor] = {}
    for (first, _), part in parts.items():
        totals[first] = totals.get(first, torch.zeros_like(part)) + part
    expected = _summed_up(expected, sorted(totals))
    if totals.keys() != expected.keys():
        verdict.problems.append(f"losses of samples {sorted(totals)} instead of {sorted(expected)} in step {number}")
        return
    got, wanted = (torch.stack([losses[first] for first in sorted(losses)]) for losses in (totals, expected))
    verdict.note("loss", relative(got[:, 0] - wanted[:, 0], wanted[:, 0]), f"step {number}")
    if not torch.equal(got[:, 1].double(), wanted[:, 1].double()):
        verdict.problems.append(f"tokens {got[:, 1].tolist()} instead of {wanted[:, 1].tolist()} in step {number}")


def _summed_up(expected: dict[int, Tensor], firsts: list[int]) -> dict[int, Tensor]:
    """Adds up those micro-batches of the reference that are one micro-batch on the ranks."""
    sums: dict[int, Tensor] = {}
    for sample, loss in sorted(expected.items()):
        first = max((first for first in firsts if first <= sample), default=sample)
        sums[first] = sums[first] + loss if first in sums else loss
    return sums


def _compare_reports(verdict: Verdict, number: int, expected: list[Step], ranks: list[Step]) -> None:
    """Compares means of the values that layers report. Each rank contributes its part of the total and of the count."""
    wanted, got = _means(expected), _means(ranks)
    for name, layer in sorted(wanted.keys() ^ got.keys()):
        who = "one process" if (name, layer) in wanted else "the layout"
        verdict.problems.append(f"only {who} reports {name} of layer {layer} in step {number}")
    for name, layer in wanted.keys() & got.keys():
        mean, other = wanted[name, layer], got[name, layer]
        verdict.note("report", relative(other - mean, mean), f"{name} of layer {layer} in step {number}")


def _means(steps: Iterable[Step]) -> dict[tuple[str, int], Tensor]:
    """Returns means by (name, layer). A report of several numbers, such as counts by expert, becomes shares."""
    sums: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    for report in (report for step in steps for report in step.reports):
        total, count = sums.get((report.name, report.layer), (torch.zeros(()), torch.zeros(())))
        sums[report.name, report.layer] = total + report.total, count + report.count
    return {place: total / (total.sum() if total.dim() else count) for place, (total, count) in sums.items()}


def _compare_slices(
    verdict: Verdict, kind: str, when: str, expected: list[TensorSlice], ranks: list[list[TensorSlice]]
) -> None:
    """Compares whole tensors that are assembled from the ranks' slices."""
    wanted, made = assemble(expected), assemble(tensor_slice for rank in ranks for tensor_slice in rank)
    verdict.problems += [f"{text} at {when}" for text in _missing(kind, wanted, made)]
    for name in wanted.keys() & made.keys():
        values = wanted[name].values
        verdict.note(kind, relative(made[name].values - values, values), f"{name} at {when}")


@dataclass
class Whole:
    """A canonical tensor that is assembled from slices."""

    values: Tensor
    """float64; NaN at elements without a slice."""
    filled: Tensor
    """bool; true at elements with a slice."""


def assemble(slices: Iterable[TensorSlice]) -> dict[str, Whole]:
    """Assembles canonical tensors, by name. Uses the first of several replicas; `_unequal_replicas` compares them."""
    made: dict[str, Whole] = {}
    known: set[Any] = set()
    for tensor_slice in slices:
        if tensor_slice.place in known:
            continue
        known.add(tensor_slice.place)
        shape = tensor_slice.global_shape
        if tensor_slice.name not in made:
            nothing = torch.full(shape, torch.nan, dtype=torch.float64)
            made[tensor_slice.name] = Whole(nothing, torch.zeros(shape, dtype=torch.bool))
        whole = made[tensor_slice.name]
        index = tensor_slice.of(torch.arange(whole.values.numel()))
        whole.values.view(-1)[index] = tensor_slice.values.double()
        whole.filled.view(-1)[index] = True
    return made


def _missing(kind: str, wanted: dict[str, Whole], made: dict[str, Whole]) -> Iterator[str]:
    yield from (f"no {kind} of {name}" for name in sorted(wanted.keys() - made.keys()))
    yield from (f"{kind} of unknown {name}" for name in sorted(made.keys() - wanted.keys()))
    for name, whole in made.items():
        if bool(whole.values.isnan().all()) or not bool(whole.filled.all()):
            yield f"parts of {kind} {name} are on no rank"
