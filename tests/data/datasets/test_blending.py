"""megatron/data/datasets/blending.py: Megatron-LM's greedy rule, from any place, in little memory."""

import json

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.blending import BlendOrder


def megatron_lm(weights, size, limits=None):
    """The rule, a sample at a time: (dataset_index, dataset_sample_index)."""
    weights = [float(weight) for weight in weights]
    taken = [0] * len(weights)
    datasets, samples = [], []
    for s in range(size):
        best, best_error = -1, -np.finfo(np.float64).max
        for i, weight in enumerate(weights):
            error = weight * max(float(s), 1.0) - taken[i]
            if error > best_error and (limits is None or taken[i] < limits[i]):
                best, best_error = i, error
        datasets.append(best)
        samples.append(taken[best])
        taken[best] += 1
    return datasets, samples


def test_golden_blends(golden):
    stored = np.load(golden / "blended" / "helpers.npz")
    cases = json.loads((golden / "blended" / "helpers.json").read_text())
    assert {case["kind"] for case in cases} == {"build_blending_indices", "build_exhaustive_blending_indices"}
    for case in cases:
        if "weights" in case:
            order = BlendOrder(np.array(case["weights"]), case["size"])
        else:
            sizes = np.array(case["sizes"])
            order = BlendOrder(sizes / sizes.sum(), int(sizes.sum()), limits=sizes)
        found = order.indices(0, order.size)
        for name in ("dataset_index", "dataset_sample_index"):
            expected = stored[f"{case['key']}_{name}"]
            assert getattr(found, name).dtype == expected.dtype
            assert np.array_equal(getattr(found, name), expected)


def some_weights(kind, random):
    count = int(random.integers(1, 40))
    weights = {
        "random": lambda: random.random(count) + 1e-9,
        "skewed": lambda: random.random(count) ** 8 + 1e-12,
        "ties": lambda: random.integers(1, 4, count).astype(float),
        "percent": lambda: random.integers(1, 100, count) / 100,
        "equal": lambda: np.ones(count),
        "tiny": lambda: np.append(np.full(count, 1e-7), 1.0),
    }[kind]()
    return weights / weights.sum()


@pytest.mark.fast("0-random", "0-skewed", "0-ties", "0-percent", "0-equal", "0-tiny")
@pytest.mark.parametrize("kind", ["random", "skewed", "ties", "percent", "equal", "tiny"])
@pytest.mark.parametrize("seed", range(4))
def test_equal_to_the_plain_rule_from_any_place(kind, seed):
    random = np.random.default_rng(seed)
    weights = some_weights(kind, random)
    size = int(random.integers(1, 40_000))
    datasets, samples = megatron_lm(weights, size)
    order = BlendOrder(weights, size)
    for place in random.integers(0, size, 5).tolist():
        assert order.locate(place) == (datasets[place], samples[place])
    whole = order.indices(0, size)
    assert whole.dataset_index.tolist() == datasets
    assert whole.dataset_sample_index.tolist() == samples
    begin, end = sorted(random.integers(0, size + 1, 2).tolist())
    part = BlendOrder(weights, size).indices(begin, end)
    assert part.dataset_index.tolist() == datasets[begin:end]
    assert part.dataset_sample_index.tolist() == samples[begin:end]
    counts = np.bincount(datasets, minlength=len(weights))
    assert np.array_equal(order.counts(), counts)
    assert (order.upper_bounds() >= counts).all()
    assert (order.upper_bounds() <= counts + 8).all()


@pytest.mark.parametrize("seed", range(6))
def test_every_sample_once(seed):
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 800, random.integers(1, 30)) + (seed == 0)
    sizes[0] += 1
    order = BlendOrder(sizes / sizes.sum(), int(sizes.sum()), limits=sizes)
    datasets, samples = megatron_lm(sizes / sizes.sum(), int(sizes.sum()), sizes)
    found = order.indices(0, order.size + 10)
    assert found.dataset_index.tolist() == datasets
    assert found.dataset_sample_index.tolist() == samples
    assert np.array_equal(order.counts(), sizes)


def test_used_up_datasets_end_the_blend():
    with pytest.raises(IndexError, match="used up after 30 of 40"):
        BlendOrder(np.array([0.5, 0.5]), 40, limits=np.array([10, 20])).counts()


def test_weight_zero_is_never_drawn():
    # Megatron-LM's rule draws the zero-weight dataset at its second step, where all errors are 0.
    assert megatron_lm([0.0, 1.0], 3)[0] == [1, 0, 1]
    assert BlendOrder(np.array([0.0, 1.0]), 3).indices(0, 3).dataset_index.tolist() == [1, 1, 1]


def test_reading_far_ahead_keeps_counts_only():
    weights = np.random.default_rng(0).random(64)
    order = BlendOrder(weights / weights.sum(), 100_000_000)
    assert len(order.known_counts) == 1, "nothing is worked out before it is read"
    order.locate(2_000_000)
    assert order.known_counts.nbytes < 64 * 8 * 130
    assert len(order._slices) == 1


def test_counts_of_another_run_are_taken_over():
    weights = np.array([0.3, 0.7])
    first = BlendOrder(weights, 100_000)
    first.counts()
    second = BlendOrder(weights, 100_000)
    assert second.adopt_counts(np.array(first.known_counts))
    assert len(second.known_counts) == len(first.known_counts)
    assert second.locate(99_999) == first.locate(99_999)
    wrong = np.array(first.known_counts)
    wrong[2, 0] += 1
    for bad in (wrong, first.known_counts[:, :1], first.known_counts.astype(np.int32), np.empty((0, 2), np.int64)):
        assert not BlendOrder(weights, 100_000).adopt_counts(bad)


def test_too_many_datasets():
    with pytest.raises(UserError, match="32767"):
        BlendOrder(np.full(40_000, 1 / 40_000), 10)
