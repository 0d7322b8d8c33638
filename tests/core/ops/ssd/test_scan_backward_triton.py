"""The gradients of Mamba-2's scan inside chunks, in Triton's interpreter."""

import pytest
import torch
from support.recurrent_kernels import scan_arguments

from megatron.core.ops.ssd import scan_backward_triton, scan_triton
from megatron.core.ops.ssd.states_triton import Sizes


def test_several_programs_can_share_the_heads_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_triton, "_CHUNK", 16)
    results = []
    for splits in (1, 2):  # of four heads, so both programs add up two
        monkeypatch.setattr(scan_backward_triton, "_splits", lambda *_, splits=splits: splits)
        leaves = [leaf.requires_grad_() for leaf in scan_arguments(18, 2, 1, 4, 8, 4, torch.float32)]
        y = scan_triton.scan_in_kernels(leaves[0], leaves[1][..., :4], *leaves[2:], None, 8, 4, 0.0)
        results.append(torch.autograd.grad(y.square().sum(), leaves))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * one.abs().max().item())


def test_heads_are_split_until_there_are_programs_for_all_multiprocessors() -> None:
    for length, groups, heads, expected in ((8192, 8, 8, 1), (4096, 1, 64, 8), (64, 1, 6, 6), (4096, 1, 6, 6)):
        sizes = Sizes(length, 1, groups, heads, 64, 128, 64)
        assert scan_backward_triton._splits(sizes, heads, 132) == expected, (length, groups, heads)
