"""Scaled rotary frequencies: where they stay, where they change, and that a row's do not depend on what lies beside it.

What whole models make of them stands in tests/core/models/test_model_options_against_transformers.py.
"""

import itertools
import math

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.ops.rope_frequencies import (
    RopeScaling,
    frequencies_of_length,
    plain_frequencies,
    scaled_frequencies,
    yarn_concentration,
    yarn_magnitude,
)
from megatron.core.tokens import SequencePart, Tokens, row_lengths

SHORT, LONG = (1.0, 1.5, 2.0, 3.0), (2.0, 4.0, 6.0, 8.0)
LONGROPE = RopeScaling("longrope", 4.0, 16, short_factor=SHORT, long_factor=LONG)
DYNAMIC = RopeScaling("dynamic", 3.0, 16)


def test_yarn_leaves_short_waves_and_divides_long_ones() -> None:
    plain = plain_frequencies(64, 10000.0)
    scaled = scaled_frequencies(64, 10000.0, RopeScaling("yarn", 8.0, 4096))
    turns = 4096 * plain / (2 * math.pi)
    ratio = plain / scaled
    assert (ratio[turns > 40] == 1.0).all() and torch.allclose(ratio[turns < 0.9], torch.tensor(8.0))
    assert (ratio.diff() >= 0).all() and ((ratio > 1.01) & (ratio < 7.9)).sum() > 5  # a mixture in between


def test_amplitudes() -> None:
    assert yarn_concentration(1.0) == 1.0 == RopeScaling("linear", 7.0).amplitude
    assert yarn_concentration(40.0, 1.0, 1.0) == 1.0 and yarn_magnitude(math.e, 2.0) == pytest.approx(1.2)
    assert RopeScaling("yarn", math.e**2).amplitude == pytest.approx(1.2)
    assert LONGROPE.amplitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
    assert RopeScaling("yarn", 4.0, attention_factor=0.7).amplitude == 0.7


@pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=lambda scaling: scaling.kind)
def test_rows_beyond_the_first_training_have_frequencies_of_their_own(scaling: RopeScaling) -> None:
    lengths = torch.tensor([3, 16, 17, 64])[:, None]
    found = frequencies_of_length(8, 100.0, scaling, lengths)
    assert torch.equal(found[0], scaled_frequencies(8, 100.0, scaling)) and torch.equal(found[0], found[1])
    if scaling is LONGROPE:
        plain = plain_frequencies(8, 100.0)
        assert torch.allclose(found[2:], plain / torch.tensor(LONG)) and torch.equal(found[2], found[3])
    else:  # the lowest frequency at 4 times the length is that of a row of 3 * 4 - 2 times
        assert found[3, 0] == 1.0 and found[3, -1] == pytest.approx(float(found[0, -1]) / 10.0, rel=1e-5)
        assert (found[0, 1:] > found[2, 1:]).all() and (found[2, 1:] > found[3, 1:]).all()


@pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=lambda scaling: scaling.kind)
@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_documents_turn_as_they_would_alone(scaling: RopeScaling, ranks: int) -> None:
    module = RotaryEmbedding(8, 1.0, rotary_base=100, scaling=scaling)
    edges = [0, 5, 25, 40]
    positions = torch.cat([torch.arange(end - first) for first, end in itertools.pairwise(edges)])
    alone = [
        module(torch.arange(end - first)[None], Tokens(end - first, 1)) for first, end in itertools.pairwise(edges)
    ]
    whole = torch.cat([rotation.cos for rotation in alone])
    for rank in range(ranks):
        part = SequencePart(rank, ranks) if ranks > 1 else None
        tokens = Tokens(40 // ranks, 1, part, cu_seqlens=torch.tensor(edges, dtype=torch.int32), max_seqlen=20)
        rows = torch.arange(40) if part is None else torch.cat([torch.arange(40).chunk(4)[n] for n in part.chunks()])
        found = module(positions[rows][None], tokens)
        assert torch.equal(found.cos, whole[rows])


def test_length_of_rows_is_that_of_all_parts() -> None:
    assert row_lengths(Tokens(6, 3)).tolist() == [[6]]
    assert row_lengths(Tokens(6, 3, SequencePart(1, 2))).tolist() == [[12]]
    packed = Tokens(4, 1, SequencePart(0, 2), cu_seqlens=torch.tensor([0, 1, 7, 8], dtype=torch.int32))
    assert row_lengths(packed).tolist() == [[1, 6, 6, 1]]


def test_numbers_have_to_fit_the_channels() -> None:
    with pytest.raises(UserError, match=r"rope_scaling_short_factor has 4 numbers; 12 channels .* needs 6"):
        RotaryEmbedding(12, 1.0, scaling=LONGROPE)
    with pytest.raises(UserError, match="dynamic: 2 channels of a head are rotated; it needs 4 at least"):
        RotaryEmbedding(2, 1.0, scaling=DYNAMIC)
