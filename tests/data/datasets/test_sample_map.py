"""megatron/data/datasets/sample_map.py against Megatron-LM's walk and both twisters written down in plain Python."""

import itertools

import numpy as np
import pytest

from megatron.data.datasets import sample_map
from megatron.data.datasets.sample_map import SampleMapPlan, build_sample_map, find_usable_documents


def mersenne_twister(seed, bits):
    """Numbers of std::mt19937 (32 bits) or std::mt19937_64, from the parameters of the C++ standard."""
    n, m, r, a, u, d, s, b, t, c, last, f = {
        32: (624, 397, 31, 0x9908B0DF, 11, 0xFFFFFFFF, 7, 0x9D2C5680, 15, 0xEFC60000, 18, 1812433253),
        64: (
            *(312, 156, 31, 0xB5026F5AA96619E9, 29, 0x5555555555555555, 17, 0x71D67FFFEDA60000, 37),
            *(0xFFF7EEE000000000, 43, 6364136223846793005),
        ),
    }[bits]
    ones = 2**bits - 1
    x = [seed & ones]
    for i in range(1, n):
        x.append((f * (x[-1] ^ x[-1] >> bits - 2) + i) & ones)
    for k in itertools.count():
        mixed = x[k] & ones - (2**r - 1) | x[k + 1] & 2**r - 1
        x.append(x[k + m] ^ mixed >> 1 ^ (a if mixed & 1 else 0))
        y = x[k + n]
        y ^= y >> u & d
        y ^= y << s & b
        y ^= y << t & c
        yield y ^ y >> last


@pytest.mark.parametrize(("bits", "expected"), [(32, 4123659995), (64, 9981545732273789042)])
def test_the_reference_is_that_of_the_standard(bits, expected):
    assert next(itertools.islice(mersenne_twister(5489, bits), 9999, None)) == expected


def walk(boundaries, lengths, plan):
    """Megatron-LM's way, document after document, then the shuffle."""
    draw = mersenne_twister(plan.seed, 32)
    ratio = int(1 / plan.short_sequence_probability + 0.5) if plan.short_sequence_probability else 0

    def next_target():
        number = next(draw) if ratio else 1
        return 2 + number % (plan.max_tokens - 1) if ratio and number % ratio == 0 else plan.max_tokens

    rows, epochs = [], 0
    for _ in range(1 if plan.num_samples is None else 10**6):
        if plan.num_samples is not None and len(rows) >= plan.num_samples:
            break
        epochs += 1
        for first, end in itertools.pairwise(boundaries.tolist()):
            sentences = lengths[first:end].tolist()
            if len(sentences) < max(1, plan.min_sentences) or (len(sentences) > 1 and max(sentences) > 512):
                continue
            target, packed = next_target(), []
            for number, length in enumerate(sentences):
                packed.append(length)
                left = len(sentences) - number - 1
                if (sum(packed) >= target and left > 1 and len(packed) >= plan.min_sentences) or left == 0:
                    rows.append((first + number + 1 - len(packed), first + number + 1, target))
                    target, packed = next_target(), []
    draw = mersenne_twister(plan.seed + 1, 64)
    for i in range(len(rows) - 1, 0, -1):
        j = next(draw) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return np.array(rows).reshape(-1, 3), epochs


@pytest.mark.parametrize("seed", range(40))
def test_a_map_equals_the_walk(seed):
    random = np.random.default_rng(seed)
    sentences = random.integers(0, 12, random.integers(1, 60))
    start = int(random.integers(0, 5))  # a split that does not begin with the first sentence
    boundaries = start + np.concatenate([[0], sentences.cumsum()])
    lengths = random.integers(1, random.choice([20, 60, 600]), boundaries[-1] + 3).astype(np.int32)
    plan = SampleMapPlan(
        num_samples=None if seed % 5 == 0 else int(random.integers(0, 3 * sentences.sum() + 2)),
        max_tokens=int(random.integers(2, 100)),
        min_sentences=int(random.integers(1, 3)),
        short_sequence_probability=float(random.choice([0, 0.05, 0.1, 0.4, 1])),
        seed=int(random.integers(0, 2**32)),
    )
    found = find_usable_documents(boundaries, lengths, plan.min_sentences)
    if not found.usable.any():
        assert build_sample_map(boundaries, lengths, found.usable, plan).rows.shape == (0, 3)
        return
    built = build_sample_map(boundaries, lengths, found.usable, plan)
    expected, epochs = walk(boundaries, lengths, plan)
    assert np.array_equal(built.rows, expected) and built.rows.dtype == np.uint32
    samples = [(int(lengths[first:end].sum()), target) for first, end, target in expected.tolist()]
    assert built.num_epochs == epochs
    assert built.num_tokens == sum(tokens for tokens, _ in samples)
    assert built.cut_tokens == sum(max(0, tokens - target) for tokens, target in samples)
    filled = np.count_nonzero(sentences)
    assert found.usable.sum() + found.too_few_sentences + found.too_long_sentence == filled


def test_rows_of_64_bits_for_more_sentences_than_32_bits_can_number(monkeypatch):
    boundaries, lengths, usable = np.array([0, 3]), np.array([5, 6, 7], np.int32), np.array([True])
    plan = SampleMapPlan(None, 50, 2, 0.1, 1)
    expected = build_sample_map(boundaries, lengths, usable, plan).rows
    kernel = sample_map._pack_sentences
    monkeypatch.setattr(sample_map, "_pack_sentences", lambda ends, _, *rest: kernel(ends, lengths, *rest))
    rows = build_sample_map(boundaries, range(2**32), usable, plan).rows
    assert rows.dtype == np.uint64 and np.array_equal(rows, expected)
