"""Names of what was not finite."""

import math

import torch

from megatron.training.log.finite import GradientProbe, NonFinite, name_non_finite

IDS = [[8, 9], [10, 11]]


def test_the_most_specific_is_named() -> None:
    losses = [{"lm loss": 1.0, "mtp loss": math.inf}, {"lm loss": 2.0}]
    found = name_non_finite(1, 5, losses, [True, False], math.nan, IDS)
    assert found == [
        NonFinite(1, 5, "mtp loss", math.inf, 0, (8, 9)),
        NonFinite(1, 5, "gradient at the embedding", None, 1, (10, 11)),
    ]


def test_a_norm_is_named_only_if_nothing_else_is() -> None:
    (found,) = name_non_finite(0, 5, [{"lm loss": 1.0}], [], math.inf, IDS)
    assert (found.what, found.microbatch, found.sample_ids) == ("gradient norm", None, (8, 9, 10, 11))
    assert name_non_finite(0, 5, [{"lm loss": 1.0}], [True], 1.0, IDS) == []
    assert name_non_finite(0, 5, [], [], None, []) == []


def test_sentences() -> None:
    assert str(NonFinite(0, 3, "lm loss", math.nan, 2, (7,))) == (
        "rank 0, iteration 3: lm loss is nan in micro-batch 2, samples [7]"
    )
    text = str(NonFinite(0, 3, "gradient norm", None, None))
    assert text.endswith("gradient norm is not finite in every micro-batch together, samples unknown")
    assert "63, ... 100 in all]" in str(NonFinite(0, 3, "lm loss", math.nan, 0, tuple(range(100))))


def test_a_probe_sees_each_backward_and_forgets_what_was_taken() -> None:
    module = torch.nn.Embedding(4, 2)
    probe = GradientProbe(module)
    for scale in (1.0, math.inf):
        (module(torch.arange(2)).sum() * scale).backward()
    with torch.no_grad():
        module(torch.arange(2))  # an evaluation has no backward
    assert [bool(flag) for flag in probe.take_tensors()] == [True, False] and probe.take_tensors() == []
    probe.remove()
    module(torch.arange(2)).sum().backward()
    assert probe.take_tensors() == []
