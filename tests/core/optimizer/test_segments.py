"""Segments one by one, widened gradients, and writes that a skipped step leaves out."""

import torch

from megatron.core.optimizer.segments import (
    FlatSegments,
    plain_segments,
    replace,
    round_into_model,
    with_main_gradients,
)


def segments(gradients: torch.dtype = torch.float32) -> FlatSegments:
    weights = [torch.tensor([1.0, 2.0]), torch.tensor([1.0 + 2**-10])]
    moments = {name: [torch.full((n,), float(i)) for n in (2, 1)] for i, name in enumerate(("a", "b"))}
    return FlatSegments(
        weights, [torch.ones(n, dtype=gradients) for n in (2, 1)], moments, [None, torch.zeros(1).bfloat16()]
    )


def test_plain_segments_have_moments_in_the_order_of_their_names() -> None:
    (weight, gradient, moments, model_weight), (_, _, _, other) = plain_segments(segments(), ("b", "a"))
    assert weight.tolist() == [1.0, 2.0] and gradient.tolist() == [1.0, 1.0]
    assert [moment.tolist() for moment in moments] == [[1.0, 1.0], [0.0, 0.0]]
    assert model_weight is None and other is not None


def test_gradients_are_widened_one_segment_at_a_time() -> None:
    wide, narrow = segments(), segments(torch.bfloat16)
    assert list(with_main_gradients(wide)) == [wide]
    parts = list(with_main_gradients(narrow))
    assert [[g.dtype for g in part.gradients] for part in parts] == [[torch.float32]] * 2
    assert all(part.weights[0] is weight for part, weight in zip(parts, narrow.weights, strict=True))


def test_weights_are_rounded_into_narrower_model_weights() -> None:
    both = segments()
    round_into_model(both)
    assert both.model_weights[1] is not None and both.model_weights[1].tolist() == [1.0]


def test_replace_writes_in_place_unless_skipped() -> None:
    old, new = torch.zeros(2), torch.tensor([1.0, float("nan")])
    replace(torch.tensor(True), (old, new))
    assert old.tolist() == [0.0, 0.0]
    replace(torch.tensor(False), (old, torch.ones(2)))
    assert old.tolist() == [1.0, 1.0]
