"""Sizes of a cache against the sizes of the model, and against what is allocated."""

import pytest
from support.generating_models import LATENT, MODELS, build

from megatron.core.inference.cache_size import CacheSize, measure_cache
from megatron.core.inference.layout_forward import LayoutForward

ROPE = {"position_embedding_type": "rope"}


@pytest.mark.parametrize(
    ("settings", "model", "per_token"),
    [
        ({"num_query_groups": 2}, ROPE, 3 * 2 * 2 * 4 * 8),  # layers, key and value, groups, channels, bytes
        (LATENT, ROPE, 3 * 4 * (6 + 3) * 8),
        ({**LATENT, "cache_mla_latents": True}, ROPE, 3 * (4 + 2) * 8),
    ],
)
def test_keys_and_values_of_a_token(settings: dict, model: dict, per_token: int) -> None:
    assert measure_cache(LayoutForward(build(settings, model)), None) == CacheSize(per_token, 0)


def test_states_of_a_hybrid() -> None:
    """One layer of attention; heads x channels x state of Mamba-2 and of a delta net, and their windows."""
    found = measure_cache(LayoutForward(build(*MODELS["hybrid"])), None)
    assert found.bytes_per_token == 2 * 4 * 4 * 8
    mamba, delta = 4 * 8 * 3, 4 * 4 * 3
    windows = 3 * (4 * 8 + 2 * 2 * 3) + 2 * (2 * 2 * 4 + 4 * 3)
    assert found.bytes_per_slot == (mamba + delta + windows) * 8


def test_pages() -> None:
    size = CacheSize(100, 1000)
    assert size.pages_within(10_000, 16, 2, 1000) == 5  # (10,000 - 2,000) / 1,600
    assert size.pages_within(10**9, 16, 2, 1000) == 2 * 63 + 1, "no more than can be used"
    assert size.pages_within(1000, 16, 2, 1000) == 0
    assert CacheSize(0, 10).pages_within(0, 16, 2, 20) == 5, "a model without attention"
    assert size.memory(5, 16, 2) == 10_000
