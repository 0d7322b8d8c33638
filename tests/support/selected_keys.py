"""Compares the kernels of sparse attention with their definitions. Runs in Triton's interpreter or on a GPU."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.attention.indexer import index_scores
from megatron.core.ops.attention.indexer_triton import index_scores_triton
from megatron.core.ops.attention.masked_triton import masked_attention_triton
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def _random(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, DTYPE)


def scores() -> None:
    """Scores of the indexer, with lengths that do not fill tiles, with and without clamped products."""
    for sq, sk, b, heads, width, relu in ((130, 140, 2, 3, 48, True), (20, 150, 1, 2, 64, False)):
        query, key, weight = _random(sq, b, heads, width), _random(sk, b, width, seed=1), _random(sq, b, heads, seed=2)
        found = index_scores_triton(query, key, weight, relu)
        exact = index_scores(query.double(), key.double(), weight.double(), relu)
        assert found.dtype is torch.float32
        assert (found.double() - exact).norm() <= 1e-5 * exact.norm()


def masks() -> None:
    """Outputs and gradients of attention with a mask: fewer key heads, rows that are not whole tiles, tiles without a
    key, heads of a power of two and a rest, packed documents."""
    bounds = torch.tensor([0, 50, 130], dtype=torch.int32, device=DEVICE)
    compare(130, 130, 2, 4, 2, 24, 16)
    compare(70, 200, 1, 2, 2, 48, 32)
    compare(130, 130, 1, 2, 2, 32, 32, cu_seqlens=bounds)
    if ON_GPU:
        compare(700, 700, 1, 4, 4, 192, 128)
        compare(512, 512, 2, 4, 1, 128, 128)


def compare(sq: int, sk: int, b: int, a: int, groups: int, width: int, value_width: int, **call: Any) -> None:
    """Compares attention with a random mask with float64. Each query sees the first key of its document."""
    shapes = (sq, b, a, width), (sk, b, groups, width), (sk, b, groups, value_width)
    heads = [_random(*shape, seed=place).requires_grad_() for place, shape in enumerate(shapes)]
    mask = torch.rand(b, 1, sq, sk, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[..., 64:128] = True
    mask[..., 0] = mask[..., 50] = False
    given = AttentionCall(mask=mask.to(DEVICE), **call)
    variant = AttentionVariant(scale=width**-0.5, causal=True)
    output = masked_attention_triton(*heads, variant, given)
    upstream = _random(*output.shape, seed=5)
    found = output, *torch.autograd.grad(output, heads, upstream)
    wide = [tensor.detach().double().requires_grad_() for tensor in heads]
    exact = attention(*wide, variant, given)
    expected = exact, *torch.autograd.grad(exact, wide, upstream.double())
    for name, ours, definition in zip(("output", "query", "key", "value"), found, expected, strict=True):
        error = (ours.double() - definition).norm() / definition.norm()
        assert error <= (1e-2 if ON_GPU else 1e-6), (name, shapes, float(error))
