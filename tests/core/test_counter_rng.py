"""Random numbers as functions of their index: known answers, distribution, independence of how the work is split."""

import math

import pytest
import torch

from megatron.core.counter_rng import philox, standard_normal, stream_key, uniform

# Known answers of Philox-4x32-10 as published with Random123: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    first, *others = counter
    words = philox((torch.tensor([first]), *others), key)
    assert tuple(int(word) for word in words) == expected


def test_counters_broadcast() -> None:
    rows, columns = torch.arange(3)[:, None], torch.arange(5)
    table = philox((rows, columns, 7, 0), (1, 2))[0]
    alone = philox((torch.tensor(2), torch.tensor(4), 7, 0), (1, 2))[0]
    assert table.shape == (3, 5) and table[2, 4] == alone


def test_keys_depend_on_every_character_and_on_the_seed() -> None:
    keys = {stream_key(seed, label) for seed in (1, 2) for label in ("a", "b", "ab", "layers.1.w", "layers.11.w")}
    assert len(keys) == 10 and stream_key(1, "a") == stream_key(1, "a")


def test_normal_values_are_normal_and_cut_as_one_likes() -> None:
    key = stream_key(1234, "weight")
    index = torch.arange(200_000)
    values = standard_normal(index, key)
    assert torch.equal(values[777:1001], standard_normal(index[777:1001], key))
    n = len(index)
    assert abs(values.mean()) < 5 / math.sqrt(n) and abs(values.var() - 1) < 5 * math.sqrt(2 / n)
    # Each of 20 equally likely bins holds its share: chi squared with 19 degrees of freedom.
    bins = torch.histc(torch.special.ndtr(values), 20, 0, 1)
    assert ((bins - n / 20) ** 2 / (n / 20)).sum() < 60


def test_an_index_beyond_32_bits_counts_in_full() -> None:
    key = stream_key(1, "big")
    low, high = torch.tensor([5]), torch.tensor([5 + (1 << 32)])
    assert standard_normal(low, key) != standard_normal(high, key)


def test_uniform_values_stay_inside() -> None:
    values = uniform(torch.arange(100_000), stream_key(1, "u"))
    assert values.min() > 0 and values.max() < 1 and abs(values.mean() - 0.5) < 0.005
