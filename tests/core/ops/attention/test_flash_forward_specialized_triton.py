"""The forward of flash attention with specialised warps. Triton's interpreter does not run it:
tests/gpu/test_attention_on_gpu.py compares it with its definition, and tests/core/ops/test_compiled_kernels.py compiles
it. Here are what it takes, and which tiles its programs compute."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops.attention import flash_forward_specialized_triton as kernel
from megatron.core.ops.attention.flash_forward_triton import Scores, Sight


def heads(width: int = 64, more: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Heads that seem to be on a GPU; `more` channels are between them."""
    tensor = torch.empty(256, 1, 2, width + more, dtype=dtype)[..., :width]
    names = "dtype", "shape", "numel", "stride", "data_ptr", "element_size"
    found = {name: getattr(tensor, name) for name in names} | {"is_cuda": True, "device": "cuda"}
    return SimpleNamespace(**(found | changes))


def taken(q: Any, v: Any = None, sink: Any = None, scores: Scores | None = None, sight: Sight | None = None) -> bool:
    return kernel.takes(q, q, v or q, sink, scores or Scores(0.1), sight or Sight(0, 0, None, 0))


def test_it_takes_plain_calls_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert all(taken(heads(width, dtype=dtype)) for width in (64, 128) for dtype in (torch.bfloat16, torch.float16))
    assert taken(heads(), sight=Sight(3, 5, 20, 0)) and taken(heads(more=8))
    assert not taken(heads(96)) and not taken(heads(64), heads(128)) and not taken(heads(dtype=torch.float32))
    assert not taken(heads(is_cuda=False)) and not taken(heads(numel=lambda: 0))
    assert not taken(heads(more=1)) and not taken(heads(data_ptr=lambda: 8))  # rows begin at multiples of 16 bytes
    assert not taken(heads(), sink=object())
    assert not taken(heads(), scores=replace(Scores(0.1), cap=30.0))
    assert not taken(heads(), sight=replace(Sight(0, 0, None, 0), hidden=torch.zeros(1)))
    capability = (10, 0)
    assert not taken(heads())


@pytest.fixture
def edges(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Lets functions of the kernel compute with Python's numbers, on tiles of 8 queries and 4 keys. Returns what their
    loads read: edges of documents in a row of 100 tokens."""
    cuts = torch.tensor([0, 1, 13, 20, 21, 50, 96, 100])
    document = torch.bucketize(torch.arange(100), cuts, right=True)
    found = torch.stack([cuts[document - 1], cuts[document]])
    functions = SimpleNamespace(
        minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b), load=lambda at: found.flatten()[at].item(),
        where=lambda condition, one, other: one if condition else other,
    )  # fmt: skip
    for name, value in (("gl", functions), ("QUERIES", 8), ("KEYS", 4)):
        monkeypatch.setattr(kernel, name, value)
    return found


def test_tiles_of_keys_are_those_that_queries_see(edges: Tensor) -> None:
    draw = random.Random(0)
    compared = 0
    for _ in range(3000):
        queries, keys = draw.randint(1, 40), draw.randint(1, 40)
        query_start, key_start = draw.randint(0, 100 - queries), draw.randint(0, 100 - keys)
        left, right = draw.choice([None, draw.randint(-20, 30)]), draw.choice([None, 0, draw.randint(-20, 30)])
        packed = draw.random() < 0.5
        m = draw.randrange(0, queries, 8)
        first, whole, whole_end, last = kernel._reach.fn(
            m, 0, queries, keys, 100, query_start, key_start, left or 0, right or 0,
            left is not None, right is not None, packed,
        )  # fmt: skip
        i, j = torch.arange(m, m + 8)[:, None], torch.arange(48)
        low, high = torch.zeros_like(i), torch.full_like(i, keys)
        if left is not None:
            low = low.maximum(i - left)
        if right is not None:
            high = high.minimum(i + right + 1)
        if packed:
            token = (query_start + i).clamp(max=99)
            low, high = low.maximum(edges[0, token] - key_start), high.minimum(edges[1, token] - key_start)
        low, high = low[: queries - m], high[: queries - m]  # rows behind the last query do not count
        early, late, seen = j < low, j >= high, (j >= low) & (j < high)
        assert 0 <= first <= whole <= whole_end <= last and first < last
        assert not seen[:, : first * 4].any() and not seen[:, last * 4 :].any()
        # These tiles are not compared with `high`, and those with neither.
        assert not late[:, first * 4 : whole * 4].any()
        assert not (early | late)[:, whole * 4 : whole_end * 4].any()
        compared += whole_end - whole
    assert compared > 1000


@pytest.mark.parametrize(("tiles", "pairs", "at_once"), [(5, 6, 2), (5, 7, 3), (1, 4, 8), (3, 1, 1)])
@pytest.mark.usefixtures("edges")
def test_every_tile_of_queries_is_computed_once_and_the_longest_of_some_heads_first(
    tiles: int, pairs: int, at_once: int
) -> None:
    places = [kernel._place.fn(number, tiles, pairs, at_once) for number in range(tiles * pairs)]
    assert sorted(places) == [(pair, m) for pair in range(pairs) for m in range(0, 8 * tiles, 8)]
    for first in range(0, pairs, at_once):
        of_these = [m for pair, m in places if first <= pair < first + at_once]
        assert of_these == sorted(of_these, reverse=True)
