"""`judge` reports values that differ, are missing, or should not exist."""

import dataclasses
import math

import pytest
import torch
from parity.compare import Verdict, judge
from parity.evidence import Evidence, Masks, Step, TensorSlice

from megatron.core.parameters import Box
from megatron.core.transformer.layer_metrics import LayerMetric

WHOLE = torch.arange(1.0, 13.0, dtype=torch.float64)  # [4, 3], by rows


def tensor_slice(start: int, rows: int, values: torch.Tensor, begin: int = 0, end: int | None = None) -> TensorSlice:
    box = Box((start, 0), (rows, 3))
    return TensorSlice("w", (4, 3), box, begin, box.numel if end is None else end, values.clone())


def balance(total: float, count: float) -> LayerMetric:
    return LayerMetric("balance", 1, total * WHOLE[0], count * WHOLE[0])


def alone() -> Evidence:
    losses = {0: torch.tensor([3.0, 2.0]), 1: torch.tensor([0.0, 0.0])}
    masks = Masks({((1, 2), 0, 5, 0): [(0, b"\1\0\1\1")]})
    whole = tensor_slice(0, 4, WHOLE)
    return Evidence([whole], [Step(losses, [whole], 2.0, [balance(1.5, 3.0)])], [whole], masks, 12**0.5)


def two_ranks() -> list[Evidence]:
    """The first has rows 0 and 1, the second rows 2 and 3; the last row in two ranges."""
    first, second = tensor_slice(0, 2, WHOLE[:6]), tensor_slice(2, 2, WHOLE[6:])
    halves = [tensor_slice(2, 2, WHOLE[6:10], 0, 4), tensor_slice(2, 2, WHOLE[10:], 4, 6)]
    losses = {0: torch.tensor([3.0, 2.0]), 1: torch.tensor([0.0, 0.0])}
    masks = [Masks({((1, 2), 0, 5, 0): [(at, bits)]}) for at, bits in ((0, b"\1\0"), (2, b"\1\1"))]
    return [
        Evidence([first], [Step(losses, [first], 2.0, [balance(0.5, 2.0)])], [first], masks[0], 12**0.5),
        Evidence([second], [Step({}, halves, 2.0, [balance(2.5, 4.0)])], [second], masks[1], 12**0.5),
    ]


def test_equal_records_have_no_difference() -> None:
    verdict = judge(alone(), two_ranks())
    assert not verdict.beyond(0.0) and verdict.largest == 0.0


def test_every_difference_is_seen() -> None:
    def changed(change) -> list[str]:
        ranks = two_ranks()
        change(ranks)
        return judge(alone(), ranks).beyond(1e-11)

    def gradient(ranks: list[Evidence]) -> None:
        ranks[1].steps[0].gradients[1].values[1] += 1e-9

    def hole(ranks: list[Evidence]) -> None:
        del ranks[1].steps[0].gradients[1]

    def start(ranks: list[Evidence]) -> None:
        ranks[0].initial[0].values[0] += 1e-15

    def name(ranks: list[Evidence]) -> None:
        ranks[0].weights[0] = dataclasses.replace(ranks[0].weights[0], name="v")

    def replica(ranks: list[Evidence]) -> None:
        ranks[1].weights.append(tensor_slice(0, 2, WHOLE[:6] * (1 + 2e-16)))

    def mask(ranks: list[Evidence]) -> None:
        ranks[1].masks.rows[(1, 2), 0, 5, 0] = [(2, b"\0\1")]

    def undrawn(ranks: list[Evidence]) -> None:
        for rank in ranks:
            rank.masks.rows.clear()

    def foreign(ranks: list[Evidence]) -> None:
        ranks[0].masks.rows[(1, 2), 0, 6, 0] = [(0, b"\1")]

    def loss(ranks: list[Evidence]) -> None:
        ranks[0].steps[0].losses[0][0] += 1e-4

    def tokens(ranks: list[Evidence]) -> None:
        ranks[0].steps[0].losses[1][1] += 1

    def norm(ranks: list[Evidence]) -> None:
        ranks[1].steps[0].norm *= 1 + 1e-10

    def ones(ranks: list[Evidence]) -> None:
        ranks[0].norm_of_ones = 15**0.5

    def lost(ranks: list[Evidence]) -> None:
        ranks[0].steps[0].gradients[0].values[0] = torch.nan

    def report(ranks: list[Evidence]) -> None:
        ranks[1].steps[0].reports[:] = [balance(2.5, 3.0)]

    def unreported(ranks: list[Evidence]) -> None:
        ranks[0].steps[0].reports.append(LayerMetric("z", 1, WHOLE[0], WHOLE[0]))

    expected = {
        report: "report: error",
        unreported: "only the layout reports z of layer 1",
        gradient: "gradient: error",
        hole: "parts of gradient w are on no rank",
        start: "initial value of w on rank 0 differs",
        name: "weights of unknown v",
        replica: "ranks 0 and 1 differ",
        mask: "1 rows of dropout masks differ",
        undrawn: "1 rows of dropout masks were never drawn",
        foreign: "1 rows of dropout masks are of no token",
        loss: "loss: error",
        tokens: "tokens [2.0, 1.0] instead of [2.0, 0.0]",
        norm: "norm: error",
        ones: "norm of ones: error",
        lost: "gradient: error inf",
    }
    for change, text in expected.items():
        assert any(text in line for line in changed(change)), (change.__name__, changed(change))


def test_nan_counts_as_the_largest_error() -> None:
    for errors in ([math.nan, 1e-3], [1e-3, math.nan], [math.inf, math.nan, 0.0]):
        verdict = Verdict()
        for error in errors:
            verdict.note("gradient", error, "somewhere")
        assert verdict.largest == math.inf and verdict.beyond(1e300)


def test_a_difference_from_a_reference_of_zeros_is_infinite() -> None:
    expected, ranks = alone(), two_ranks()
    for evidence in (expected, *ranks):
        gradients = evidence.steps[0].gradients
        gradients[:] = [dataclasses.replace(each, values=torch.zeros_like(each.values)) for each in gradients]
    assert not judge(expected, ranks).beyond(1e-11)
    ranks[0].steps[0].gradients[0].values[0] = 1e-30
    assert judge(expected, ranks).errors["gradient"] == pytest.approx(float("inf"))
