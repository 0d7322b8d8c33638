"""Attention of this rank's queries to the keys of all ranks, which a key-value exchange fetches step by step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import Pending
from megatron.core.context_parallel.kv_exchange import Ring
from megatron.core.context_parallel.tiles import QueryKeyTile
from megatron.core.ops.attention.blocks import BlockCall
from megatron.core.ops.attention.kernels import BlockKernel
from megatron.core.ops.attention.unfused import AttentionVariant
from megatron.core.ops.precision import at_least_float32, widened
from megatron.core.utils.autograd_context import AutogradContext


@dataclass(frozen=True)
class RingCall:
    """The arguments of `ring_attention` that are not tensors."""

    exchange: Ring
    kernel: BlockKernel
    merge: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """`ops.attention.blocks.merge_block`, or a faster one."""
    variant: AttentionVariant
    call: BlockCall


def ring_attention(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, ring: RingCall) -> Tensor:
    """Returns attention [s, b, a, dv] of this rank's query [s, b, a, d], with key [s, b, g, d] and value [s, b, g, dv].

    `sink` [a] is an extra logit of each head in the softmax's denominator. Partial results are merged in float32 at
    least. Backward fetches the keys again instead of keeping them, and returns their gradients step by step.
    """
    return _RingAttention.apply(query, key, value, sink, ring)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, ring: RingCall
    ) -> Tensor:
        s, b, a, _ = query.shape
        wide = at_least_float32(query.dtype)
        total = query.new_zeros(s, b, a, value.shape[3], dtype=wide)
        total_lse = query.new_full((b, a, s), -torch.inf, dtype=wide)
        packing = _Packing(key, value)
        for tiles, key_rows, value_rows in packing.steps(ring.exchange):
            for tile in tiles:
                rows = tile.queries
                output, lse = ring.kernel.forward(
                    query[rows], key_rows[tile.keys], value_rows[tile.keys], tile.offsets, ring.variant, ring.call
                )
                ring.merge(total[rows], total_lse[..., rows], output, lse)
        if sink is not None:
            with_sink = torch.logaddexp(total_lse, sink.to(wide)[None, :, None])
            total *= _by_query(torch.exp(total_lse - with_sink))
            total_lse = with_sink
        output = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, sink, output, total_lse)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, sink, output, lse = ctx.saved_tensors
        ring: RingCall = ctx.ring
        gradient = gradient.contiguous()  # GPU kernels need contiguous channels
        wide = at_least_float32(query.dtype)
        query_gradient = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
        packing = _Packing(key, value)
        own = key.new_zeros(key.shape[0], packing.width, dtype=wide)
        add_returned: Callable[[], Tensor] | None = None
        for step, (tiles, key_rows, value_rows) in enumerate(packing.steps(ring.exchange)):
            alone = step > 0 and [tile.keys for tile in tiles] == [slice(0, key_rows.shape[0])]  # all fetched keys
            part = own if step == 0 or alone else own.new_zeros(key_rows.shape[0], packing.width)
            for tile in tiles:
                rows, keys = tile.queries, tile.keys
                tensors = query[rows], key_rows[keys], value_rows[keys], output[rows], lse[..., rows]
                query_part, *key_parts = ring.kernel.backward(
                    gradient[rows], *tensors, tile.offsets, ring.variant, ring.call
                )
                query_gradient[rows] += query_part
                if alone:
                    part = packing.pack(*key_parts)
                else:
                    for total, addend in zip(packing.unpack(part[keys]), key_parts, strict=True):
                        total.add_(addend)
            if add_returned is not None:
                add_returned()
            if step:
                add_returned = ring.exchange.start_return(step, part.to(key.dtype), own)
        if add_returned is not None:
            add_returned()
        sink_gradient = _sink_gradient(gradient, output, lse, sink) if ctx.needs_input_grad[3] else None
        key_gradient, value_gradient = (total.to(key.dtype) for total in packing.unpack(own))
        return query_gradient.to(query.dtype), key_gradient, value_gradient, sink_gradient, None


class _Packing:
    """Packs keys [s, b, g, d] and values [s, b, g, dv] into one tensor of rows [s, width], sent as one message."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value
        self.shapes = key.shape[1:], value.shape[1:]
        self.width = self.shapes[0].numel() + self.shapes[1].numel()

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns key and value as views of the rows."""
        for_keys = self.shapes[0].numel()
        return rows[:, :for_keys].unflatten(1, self.shapes[0]), rows[:, for_keys:].unflatten(1, self.shapes[1])

    def steps(self, exchange: Ring) -> Iterator[tuple[tuple[QueryKeyTile, ...], Tensor, Tensor]]:
        """Yields the tiles, keys and values of each step. The next step's keys are sent while a step is computed."""
        own: Tensor | None = None
        pending: Pending | None = None
        for step, tiles in enumerate(exchange.steps):
            rows = None if pending is None else pending.wait()
            if step + 1 < len(exchange.steps):
                own = own if own is not None else self.pack(self.key, self.value)
                pending = exchange.start_fetch(step + 1, own)
            yield (tiles, self.key, self.value) if rows is None else (tiles, *self.unpack(rows))

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        """Returns the rows of a key and a value."""
        return torch.cat([key.flatten(1), value.flatten(1)], 1)


def _by_query(numbers: Tensor) -> Tensor:
    """[b, a, s] -> [s, b, a, 1]."""
    return numbers.permute(2, 0, 1)[..., None]


def _sink_gradient(gradient: Tensor, output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Returns the sink's gradient. The sink has a probability but no value."""
    delta = (widened(gradient) * widened(output)).sum(-1).permute(1, 2, 0)  # [b, a, s]
    probability = torch.exp(sink.to(lse.dtype)[None, :, None] - lse)
    return -(probability * delta).sum((0, 2)).to(sink.dtype)
