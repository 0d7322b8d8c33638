"""How tensors reach the flash kernel of a GPU, and come back: heads of one width, a multiple of 8, the batch first."""

import pytest
import torch
from support import fused_kernels
from torch import Tensor

from megatron.core.ops.attention import blocks_cuda as kernels

S, B, HEADS, GROUPS = 7, 2, 4, 2
EDGES = torch.tensor([0, 3, S], dtype=torch.int32)


def in_our_layout(heads: Tensor) -> Tensor:
    return heads.transpose(0, 1) if heads.dim() == 4 else heads[:, None]


def in_theirs(heads: Tensor, like: Tensor) -> Tensor:
    return heads.transpose(0, 1) if like.dim() == 4 else heads.squeeze(1)


def checked(*tensors: Tensor) -> list[Tensor]:
    """Returns the tensors in our layout, after the checks that the kernel makes."""
    assert len({tensor.shape[-1] for tensor in tensors}) == 1 and tensors[0].shape[-1] % 8 == 0
    return [in_our_layout(tensor) for tensor in tensors]


def lengths_of(queries: Tensor | None, keys: Tensor | None, longest: tuple[int, int]) -> kernels.Lengths | None:
    return None if queries is None else kernels.Lengths(queries, keys, longest)


def forward(query, key, value, queries, keys, mq, mk, p, causal, debug, *, scale, window_size_left, window_size_right):
    window, lengths = (window_size_left, window_size_right), lengths_of(queries, keys, (mq, mk))
    output, lse = fused_kernels.flash_forward(*checked(query, key, value), scale, window, lengths)
    return in_theirs(output, query), lse if lengths is None else lse[0], None, None, None


def backward(
    gradient, query, key, value, output, lse, queries, keys, mq, mk, p, causal, seed, offset,
    *, scale, window_size_left, window_size_right,
):  # fmt: skip
    window, lengths = (window_size_left, window_size_right), lengths_of(queries, keys, (mq, mk))
    tensors = checked(gradient, query, key, value, output)
    lse = lse if lengths is None else lse[None]
    parts = fused_kernels.flash_backward(*tensors, lse, scale, window, lengths)
    return tuple(in_theirs(part, query) for part in parts)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("widths", [(6, 6), (24, 16), (6, 5), (5, 14)], ids=str)
def test_flash(widths: tuple[int, int], packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    b, (d, dv) = 1 if packed else B, widths
    shapes = [(S, b, HEADS, dv), (S, b, HEADS, d), (S, b, GROUPS, d), (S, b, GROUPS, dv)]
    gradient, *tensors = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    rules = 0.4, (-1, 0), kernels.Lengths(EDGES, EDGES, (4, 4)) if packed else None
    output, lse = fused_kernels.flash_forward(*tensors, *rules)
    expected = [output, lse, *fused_kernels.flash_backward(gradient, *tensors, output, lse, *rules)]
    monkeypatch.setattr(kernels, "flash_attention_forward", forward)
    monkeypatch.setattr(kernels, "flash_attention_backward", backward)
    found_output, found_lse = kernels.flash_forward(*tensors, *rules)
    found = [found_output, found_lse, *kernels.flash_backward(gradient, *tensors, found_output, found_lse, *rules)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-13 * theirs.abs().max()
