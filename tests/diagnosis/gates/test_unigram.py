"""The unigram entropy of data, against a plain count."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.runs import write_documents

from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.diagnosis.gates.unigram import facts_of_blend, facts_of_flags, unigram_entropy


def counted(*prefixes: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for prefix in prefixes:
        data = IndexedDataset(prefix)
        for number in range(len(data)):
            found.update(data[number].tolist())
    return found


def entropy(shares: list[float]) -> float:
    return -sum(share * math.log(share) for share in shares if share)


def test_uniform_tokens_have_the_entropy_of_their_number() -> None:
    assert unigram_entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4))


def test_of_one_data_set(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "a")
    counts = counted(prefix)
    expected = entropy([count / counts.total() for count in counts.values()])
    assert facts_of_blend(([prefix], None)).unigram == pytest.approx(expected, rel=1e-12)
    assert facts_of_flags({"data_path": [prefix]}).unigram == pytest.approx(expected, rel=1e-12)


def test_a_blend_mixes_frequencies_by_its_weights(tmp_path: Path) -> None:
    a, b = write_documents(tmp_path / "a"), write_documents(tmp_path / "b", vocabulary=7, seed=1)
    ones, others = counted(a), counted(b)
    shares = [0.9 * ones[i] / ones.total() + 0.1 * others[i] / others.total() for i in range(50)]
    assert facts_of_blend(([a, b], [0.9, 0.1])).unigram == pytest.approx(entropy(shares), rel=1e-12)


def test_a_sample_is_near_the_whole(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "a", documents=3000)
    whole, sample = facts_of_blend(([prefix], None)), facts_of_blend(([prefix], None), tokens=8000)
    assert whole.unigram is not None and sample.unigram != whole.unigram
    assert sample.unigram == pytest.approx(whole.unigram, rel=0.02)


def test_data_that_does_not_exist_or_is_made_up_has_no_entropy(tmp_path: Path) -> None:
    assert facts_of_blend(([str(tmp_path / "none")], None)).unigram is None
    assert facts_of_flags({"mock_data": True}).unigram is None
    assert facts_of_flags({}).unigram is None
