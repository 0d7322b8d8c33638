"""Rates: of the CPU beside a plain measurement, and pairs that make a ring."""

import time

import pytest
import torch

from megatron.diagnosis.doctor.measurement import measure_rank, pairs_of


def test_rates_of_a_cpu_are_those_of_its_products() -> None:
    found = measure_rank(torch.device("cpu"))
    left = torch.randn(768, 768)
    best = min(_seconds(lambda: left @ left) for _ in range(10))
    assert 0.05 < found.products / (2 * 768**3 / best) < 3  # other programs share the cores
    assert found.copy > 1e7 and found.attention_64 is None


def _seconds(step: object) -> float:
    began = time.perf_counter()
    step()  # type: ignore[operator]
    return time.perf_counter() - began


@pytest.mark.parametrize("ranks", range(2, 10))
def test_pairs_are_disjoint_in_a_round_and_reach_all_ranks(ranks: int) -> None:
    rounds = list(pairs_of(ranks))
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members)) and all(0 <= rank < ranks for rank in members)
    links = {frozenset(pair) for pairs in rounds for pair in pairs}
    reached = {0}
    for _ in range(ranks):
        reached |= {rank for link in links if link & reached for rank in link}
    assert reached == set(range(ranks)) and all(len(link) == 2 for link in links)
