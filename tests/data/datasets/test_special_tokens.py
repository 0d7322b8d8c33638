"""megatron/data/datasets/special_tokens.py against Megatron-LM's rules, taken one end of document at a time."""

import numpy as np
import pytest

from megatron.data.datasets.special_tokens import causal_mask, cumulative_lengths, document_mask, restarted_positions

EOD = 0


def reference(tokens):
    length = len(tokens)
    mask = np.triu(np.ones((length, length), bool), k=1)
    positions = np.arange(length)
    previous = 0
    for i in np.flatnonzero(tokens == EOD):
        mask[i + 1 :, : i + 1] = True
        positions[i + 1 :] -= i + 1 - previous
        previous = i + 1
    return mask[None], positions


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        [0],
        [0, 0, 0],
        [1, 0],
        [0, 1],
        [1, 0, 2, 0],
        [1, 0, 0, 2],
        *np.random.default_rng(0).integers(0, 6, (8, 40)),
    ],
)
def test_boundaries_mean_what_megatron_lms_masks_mean(tokens):
    tokens = np.array(tokens)
    boundaries = cumulative_lengths(tokens, EOD)
    mask, positions = reference(tokens)
    assert boundaries.dtype == np.int32
    assert boundaries[0] == 0
    assert boundaries[-1] == len(tokens)
    assert (np.diff(boundaries) > 0).all()
    assert np.array_equal(document_mask(boundaries), mask)
    assert np.array_equal(restarted_positions(boundaries), positions)


def test_causal_mask():
    assert causal_mask(3).tolist() == [[[False, True, True], [False, False, True], [False, False, False]]]
