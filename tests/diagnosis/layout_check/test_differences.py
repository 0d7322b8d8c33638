"""The judge of two layouts: what is the first difference, and on which rank."""

import pytest
import torch

from megatron.diagnosis.layout_check.differences import differences, report
from megatron.diagnosis.layout_check.layout_trace import FORWARD, GRADIENT, INITIAL, NORM, WEIGHT, LayoutTrace

TOKENS = torch.arange(8)
NAMES = ("embedding.weight", "decoder.layers.0.weight", "output_layer.weight")


def seen(part: slice = slice(None)) -> LayoutTrace:
    """What a rank has that holds a part of every tensor, and sees a part of the tokens."""
    trace = LayoutTrace()
    for kind in (INITIAL, GRADIENT, WEIGHT):
        for number, name in enumerate(NAMES):
            trace.add(kind, name, TOKENS[part], torch.sin(TOKENS[part] + number + 1.0).double())
    for name in ("embedding", "decoder.layers.0.mlp", "decoder.layers.0"):
        trace.add(FORWARD, name, TOKENS[part], torch.cos(TOKENS[part, None] + torch.arange(3.0)).double())
    trace.add(NORM, "of step 1", torch.zeros(1, dtype=torch.int64), torch.tensor([2.0], dtype=torch.float64))
    return trace


def ranks() -> list[LayoutTrace]:
    return [seen(slice(0, 5)), seen(slice(5, 8)), seen(slice(0, 5))]


def change(trace: LayoutTrace, kind: str, name: str, by: float = 1e-6) -> None:
    trace.found[kind, name][1][-1] += by


def test_nothing_differs():
    assert differences(seen(), ranks(), 1e-9) == []
    (line,) = report([], {}, 5, 1e-9)
    assert line == "equal: 5 values compared, none differs by more than 1e-09 of its largest value"


def test_the_first_in_the_order_of_a_run_is_first():
    found = ranks()
    for kind, name in ((WEIGHT, NAMES[0]), (NORM, "of step 1"), (GRADIENT, NAMES[0]), (GRADIENT, NAMES[2])):
        change(found[1], kind, name)
    change(found[2], FORWARD, "decoder.layers.0")
    change(found[1], FORWARD, "decoder.layers.0.mlp")
    order = [(d.kind, d.name) for d in differences(seen(), found, 1e-9)]
    assert order == [
        (FORWARD, "decoder.layers.0.mlp"),
        (FORWARD, "decoder.layers.0"),
        (GRADIENT, NAMES[2]),  # the loss's side first
        (GRADIENT, NAMES[0]),
        (NORM, "of step 1"),
        (WEIGHT, NAMES[0]),
    ]


def test_ranks_error_and_place_are_named():
    found = ranks()
    change(found[0], GRADIENT, NAMES[1], 1e-3)
    change(found[2], GRADIENT, NAMES[1], 1e-2)
    (difference,) = differences(seen(), found, 1e-9)
    assert difference.ranks == (0, 2) and difference.where == "element 4 most"
    assert difference.error == pytest.approx(1e-2, rel=0.1)
    text = "\n".join(report([difference], {0: {"tp": 0, "dp": 1}, 2: {"tp": 1, "dp": 0}}, 5, 1e-9))
    assert "the first is the gradient of decoder.layers.0.weight" in text
    assert "on rank 0 (tp 0, dp 1)" in text and "on rank 2 (tp 1, dp 0)" in text


def test_initial_weights_are_equal_to_the_bit_and_the_rest_to_rounding():
    found = ranks()
    for kind in (INITIAL, GRADIENT):
        values = found[0].found[kind, NAMES[0]][1]
        values[0] = torch.nextafter(values[0], torch.tensor(9.0, dtype=torch.float64))
    assert [d.kind for d in differences(seen(), found, 1e-9)] == [INITIAL]


def test_what_is_missing_or_not_finite_is_a_difference():
    lost = [seen(slice(0, 5)), seen(slice(6, 8))]
    found = differences(seen(), lost, 1e-9)
    assert len(found) == 12 and found[0].where == "1 of 8 places are on no rank"
    unknown = ranks()
    unknown[1].add(GRADIENT, "new", TOKENS, TOKENS.double())
    assert differences(seen(), unknown, 1e-9)[0].where == "one process has no such value"
    broken = ranks()
    change(broken[1], GRADIENT, NAMES[0], float("nan"))
    assert differences(seen(), broken, 1e-9)[0].error == float("inf")
    foreign = ranks()
    foreign[0].add(FORWARD, "embedding", torch.tensor([99]), torch.ones(1, 3, dtype=torch.float64))
    assert differences(seen(), foreign, 1e-9)[0].where == "at places that one process does not have"


def test_zeros_with_rounding_are_zeros():
    reference, found = seen(), ranks()
    for trace in (reference, *found):
        trace.found[GRADIENT, NAMES[0]][1].zero_()
    change(found[0], GRADIENT, NAMES[0], 1e-18)
    assert differences(reference, found, 1e-9) == []


def test_evidence_is_kept_in_files(tmp_path):
    trace = seen(slice(2, 6))
    trace.save(tmp_path / "rank_0.safetensors")
    again = LayoutTrace.load(tmp_path / "rank_0.safetensors")
    assert list(again.found) == list(trace.found)
    for key, (places, values) in trace.found.items():
        assert torch.equal(again.found[key][0], places) and torch.equal(again.found[key][1], values)


def test_what_a_token_gave_first_stays():
    trace = LayoutTrace()
    trace.add(FORWARD, "mlp", torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    trace.add(FORWARD, "mlp", torch.tensor([1, 2]), torch.tensor([9.0, 3.0]))
    places, values = trace.found[FORWARD, "mlp"]
    assert places.tolist() == [0, 1, 2] and values.tolist() == [1.0, 2.0, 3.0]
