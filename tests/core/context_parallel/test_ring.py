"""Attention over an exchange of keys, with an exchange that has all keys in this process."""

import pytest
import torch
from torch import Tensor

from megatron.core.communication.collectives import Pending
from megatron.core.context_parallel.kv_exchange import Gather, PendingKeyValues
from megatron.core.context_parallel.ring import RingCall, ring_attention
from megatron.core.context_parallel.splitting import cut_rows
from megatron.core.ops.attention.blocks import BlockCall, merge_block
from megatron.core.ops.attention.kernels import UNFUSED_BLOCKS
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.tokens import SequencePart

ROW, CHUNK, HEADS, WIDTH = 12, 3, 2, 4
VARIANT = AttentionVariant(0.5, True, window=(4, 0))


class WholeRows(Gather):
    """Has the packed keys and values of the whole row, and keeps the gradients that are returned for them."""

    def __init__(self, part: SequencePart, rows: Tensor) -> None:
        super().__init__(part, None, CHUNK, VARIANT.reach, True)
        self.rows, self.returned = rows, torch.zeros_like(rows)

    def start_fetch(self, step: int, own: Tensor) -> PendingKeyValues:
        return PendingKeyValues(Pending(self.rows, None), lambda rows: rows)

    def start_return(self, step: int, gradient: Tensor, total: Tensor) -> PendingKeyValues:
        self.returned += gradient
        return PendingKeyValues(Pending(gradient, None), lambda rows: total)


@pytest.mark.parametrize("with_sink", [False, True])
def test_the_parts_of_all_ranks_are_the_whole(with_sink: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value, dy = (
        torch.randn(ROW, 1, HEADS, WIDTH, dtype=torch.float64, generator=generator) for _ in "qkvd"
    )
    sink = torch.tensor([0.3, -0.2], dtype=torch.float64) if with_sink else None
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    expected = attention(*leaves, VARIANT, AttentionCall(sink=sink))
    gradients = torch.autograd.grad(expected, leaves, dy)
    packed = torch.cat([key.detach().flatten(1), value.detach().flatten(1)], 1)
    found = torch.zeros_like(packed)
    for rank in range(2):
        part = SequencePart(rank, 2)
        exchange = WholeRows(part, packed)
        mine = [cut_rows(tensor.detach(), part, 0).requires_grad_() for tensor in leaves]
        call = RingCall(exchange, UNFUSED_BLOCKS, merge_block, VARIANT, BlockCall())
        output = ring_attention(*mine, sink, call)
        assert torch.allclose(output, cut_rows(expected, part, 0), rtol=1e-12, atol=1e-14)
        query_gradient, *own = torch.autograd.grad(output, mine, cut_rows(dy, part, 0))
        assert torch.allclose(query_gradient, cut_rows(gradients[0], part, 0), rtol=1e-11, atol=1e-14)
        index = cut_rows(torch.arange(ROW), part, 0)
        found += exchange.returned.index_add(0, index, torch.cat([part.flatten(1) for part in own], 1))
    assert torch.allclose(
        found, torch.cat([gradient.flatten(1) for gradient in gradients[1:]], 1), rtol=1e-11, atol=1e-14
    )
