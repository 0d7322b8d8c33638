"""megatron/data/datasets/index_building.py against Megatron-LM's walk written down step by step."""

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets import index_building
from megatron.data.datasets.index_building import (
    build_document_index,
    build_indices,
    build_sample_index,
    plan_samples,
    shuffle,
)


def walk(lengths, document_index, sequence_length, extra, num_samples):
    """Megatron-LM's way: fill sample after sample, sequence after sequence."""
    rows = [(0, 0)]
    entry, offset = 0, 0
    for _ in range(num_samples):
        remaining = sequence_length + extra
        while remaining:
            left = int(lengths[document_index[entry]]) - offset
            remaining -= left
            if remaining <= 0:
                offset += remaining + left - extra
                remaining = 0
            elif entry == len(document_index) - 1:
                offset = int(lengths[document_index[entry]]) - extra
                remaining = 0
            else:
                entry, offset = entry + 1, 0
        rows.append((entry, offset))
    return np.array(rows)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_cuts_equal_the_walk(seed, extra, drop_last, monkeypatch):
    monkeypatch.setattr(index_building, "_DOCUMENTS_AT_ONCE", 64)
    random = np.random.default_rng(seed)
    lengths = random.integers(0 if seed % 3 else 1, 40, random.integers(1, 9000 if seed == 0 else 60)).astype(np.int32)
    lengths[-1] = max(lengths[-1], 1)
    sequence_length = int(random.integers(1, 50))
    asked = None if seed % 4 == 0 else int(random.integers(1, 6 * lengths.sum() // sequence_length + 2))
    plan = plan_samples(int(lengths.sum()), asked, sequence_length, extra, drop_last)
    indices = build_indices(range(len(lengths)), lengths, plan, seed)
    if not drop_last and lengths[indices.document_index[-1]] == 0:
        pytest.skip("the walk's last row is negative after an empty last sequence")
    expected = walk(lengths, indices.document_index, sequence_length, extra, plan.num_samples)
    assert np.array_equal(indices.sample_index, expected)
    assert indices.sample_index.dtype == np.int32
    assert indices.shuffle_index.dtype == np.uint32


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_the_least_that_gives_enough(seed):
    random = np.random.default_rng(seed)
    tokens, asked, length = (int(random.integers(1, limit)) for limit in (500, 300, 40))
    plan = plan_samples(tokens, asked, length, 1)
    assert plan.num_samples >= asked
    assert plan.num_epochs * tokens >= asked * length + 1
    assert plan.num_epochs == 1 or (plan.num_epochs - 1) * tokens < asked * length + 1


def test_the_last_epoch_is_shuffled_apart_when_little_of_it_is_used():
    lengths = np.full(10, 10, np.int32)
    apart = plan_samples(100, 22, 10, 0)  # 2.2 epochs: 20% of the last
    mixed = plan_samples(100, 29, 10, 0)  # 2.9 epochs
    assert (apart.num_epochs, apart.samples_before_last_epoch) == (3, 20)
    assert (mixed.num_epochs, mixed.samples_before_last_epoch) == (3, None)
    indices = build_indices(range(10), lengths, apart, seed=1)
    assert sorted(indices.document_index[20:]) == list(range(10))
    assert sorted(indices.shuffle_index[20:]) == list(range(20, 30))
    assert sorted(build_indices(range(10), lengths, mixed, seed=1).document_index[20:]) != list(range(10))


def test_numpys_generator_draws_documents_first_then_samples():
    lengths = np.arange(1, 31, dtype=np.int32)
    plan = plan_samples(int(lengths.sum()), None, 7, 1)
    indices = build_indices(range(30), lengths, plan, seed=5)
    random = np.random.RandomState(5)
    documents, order = np.arange(30, dtype=np.int32), np.arange(plan.num_samples, dtype=np.uint32)
    random.shuffle(documents)
    random.shuffle(order)
    assert np.array_equal(indices.document_index, documents)
    assert np.array_equal(indices.shuffle_index, order)


def test_given_sequences_are_not_changed():
    ids = np.arange(10, dtype=np.int32)
    build_document_index(ids, plan_samples(100, 12, 10, 0), np.random.RandomState(0))
    assert ids.tolist() == list(range(10))


def test_long_sequences_get_wide_cuts():
    lengths = np.array([5, 2**31 - 1], np.int64) + np.array([0, 5])
    plan = plan_samples(int(lengths.sum()), None, 2**29, 1)
    cuts = build_sample_index(lengths, np.array([0, 1], np.int32), plan)
    assert cuts.dtype == np.int64
    assert cuts[:3].tolist() == [[0, 0], [1, 2**29 - 5], [1, 2**30 - 5]]


def test_partial_samples_are_counted_in_integers():
    tokens = 2**24 * 3 + 2  # float32 has no such odd numbers
    assert plan_samples(tokens, None, 1, 1, drop_last_partial=False).num_samples == tokens - 1


@pytest.mark.parametrize("length", [*range(10), 15, 16, 17, 255, 256, 257, 5000])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_a_shuffle_is_that_of_numpy_and_leaves_the_same_state(length, dtype, monkeypatch):
    monkeypatch.setattr(index_building, "_WORDS_AT_ONCE", 64)
    values, expected = np.arange(length, dtype=dtype), np.arange(length, dtype=dtype)
    random, other = np.random.RandomState(length), np.random.RandomState(length)
    random.randint(3), other.randint(3)
    shuffle(values, random)
    other.shuffle(expected)
    assert np.array_equal(values, expected) and values.dtype == dtype
    assert np.array_equal(random.randint(0, 1 << 32, 700, np.uint32), other.randint(0, 1 << 32, 700, np.uint32))


def test_more_values_than_a_word_can_choose_from_are_shuffled_too(monkeypatch):
    """With 2^32 values, the search for a mask of as many bits would never end."""
    monkeypatch.setattr(index_building, "_MOST_DRAWN", 20)
    monkeypatch.setattr(index_building, "_swap", None)
    values, expected = np.arange(21), np.arange(21)
    shuffle(values, np.random.RandomState(3))
    np.random.RandomState(3).shuffle(expected)
    assert np.array_equal(values, expected)


def test_indices_that_no_memory_holds_are_refused():
    plan = plan_samples(tokens_per_epoch=1000, num_samples=10**15, sequence_length=10, extra_tokens=1)
    with pytest.raises(UserError, match=r"1000000000000099 samples in .* epochs: .* take .* GB, and this machine has"):
        build_indices(range(3), np.array([400, 300, 300], np.int32), plan, seed=1)
