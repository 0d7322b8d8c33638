"""The backward kernel of our own flash attention, in Triton's interpreter."""

import pytest
import torch
from support import flash_agreement

from megatron.core.ops.attention.flash_backward_triton import flash_backward_triton
from megatron.core.ops.attention.flash_forward_triton import Scores, Sight, TileSize


@pytest.mark.fast("False-True", "True-False")
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_blocks_add_up(packed: bool, drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flash_agreement.use_small_tiles(monkeypatch)
    flash_agreement.blocks(packed, drops)


def test_queries_without_keys_and_keys_without_queries_get_zeros() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (torch.randn(20, 1, 2, 16, generator=generator) for _ in range(4))
    lse = torch.zeros(1, 2, 20)
    lse[..., :6] = -torch.inf
    parts = flash_backward_triton(
        gradient,
        query,
        key,
        value,
        gradient,
        lse,
        Scores(0.3),
        Sight(0, 0, None, -6),
        None,
        0.0,
        TileSize(16, 16, 4, 1),
        torch.float32,
    )
    for part, zeros in zip(parts[:3], (slice(0, 6), slice(14, 20), slice(14, 20)), strict=True):
        assert part.isfinite().all() and part[10].any() and not part[zeros].any()
