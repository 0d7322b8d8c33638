"""Checks that compare our own flash attention with its definition in float64. They run in Triton's interpreter, in
small tiles and float32, or on a GPU, in its tiles and bfloat16."""

import itertools
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron.core.ops.attention import flash_triton
from megatron.core.ops.attention.alibi import alibi_slopes
from megatron.core.ops.attention.blocks import BlockCall, BlockOffsets, merge_block
from megatron.core.ops.attention.flash_forward_triton import TileSize
from megatron.core.ops.attention.flash_triton import (
    flash_attention_triton,
    flash_block_attention_backward_triton,
    flash_block_attention_triton,
)
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.ops.dropout.dropout import Draw, DropoutRngPosition, dropout_tokens, keep_rows
from megatron.core.ops.dropout.keep_bits_triton import KeepBits, SeenKeys, keep_bits_triton
from megatron.core.ops.relative_position import relative_position_bias
from megatron.core.tokens import RngPosition, Tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 2e-2 if ON_GPU else 2e-5


@dataclass(frozen=True)
class Case:
    """A layer and the shape of a call."""

    variant: AttentionVariant
    length: int
    """Queries; on a GPU 8 times as many."""
    more_keys: int = 0
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (16, 16)
    """Channels of keys and of values; on a GPU 4 times as many."""
    packed: bool = False
    hides: bool = False


SCALE = 0.3
CASES = {
    "causal": Case(AttentionVariant(SCALE, True), 70, batch=1),
    "causal, wide": Case(AttentionVariant(SCALE, True), 70, widths=(32, 32), heads=(4, 1)),
    "bidirectional, wide, more keys than queries": Case(
        AttentionVariant(SCALE, False), 33, more_keys=8, widths=(32, 32), heads=(2, 2)
    ),
    "window, packed, wide": Case(
        AttentionVariant(SCALE, True, window=(20, 0)), 70, batch=1, packed=True, widths=(32, 32)
    ),
    "wide keys, more keys than queries": Case(AttentionVariant(SCALE, True), 33, more_keys=31, widths=(48, 16)),
    "bidirectional, dropped": Case(AttentionVariant(SCALE, False, dropout=0.3), 41, heads=(2, 2)),
    "causal, dropped": Case(AttentionVariant(SCALE, True, dropout=0.3), 64, batch=1),
    "causal, wide, dropped": Case(AttentionVariant(SCALE, True, dropout=0.3), 70, widths=(32, 32), heads=(4, 1)),
    "window, packed, dropped": Case(
        AttentionVariant(SCALE, True, window=(20, 0), dropout=0.2), 70, batch=1, packed=True
    ),
    "packed, dropped": Case(AttentionVariant(SCALE, True, dropout=0.1), 67, batch=1, packed=True, widths=(20, 12)),
    "padding": Case(AttentionVariant(SCALE, False, dropout=0.1), 40, hides=True, heads=(2, 1)),
    "window, capped": Case(AttentionVariant(SCALE, True, window=(20, 0), cap=1.5), 70, batch=1, heads=(2, 1)),
    "window, sink, packed": Case(AttentionVariant(SCALE, False, window=(9, 40), sink=True), 70, batch=1, packed=True),
    "ALiBi, sink, dropped": Case(
        AttentionVariant(SCALE, True, slopes=alibi_slopes(8), sink=True, dropout=0.2), 50, heads=(3, 1)
    ),
    "relative bias, padding, dropped": Case(
        AttentionVariant(SCALE, False, dropout=0.1, adds_bias=True), 40, hides=True, heads=(2, 1)
    ),
    "relative bias, packed": Case(AttentionVariant(SCALE, True, adds_bias=True), 37, batch=1, packed=True),
    "chunks": Case(AttentionVariant(SCALE, True, chunk=16, cap=2.0), 64, packed=True),
}


def reference_bits(
    draw: Draw, query: Tensor, first_key: Tensor, num_keys: int, heads: range, seen: SeenKeys, by_query: bool,
    by_key: bool,
) -> KeepBits:  # fmt: skip
    """The definition of `keep_bits_triton`, for pairs that are seen."""
    rows = [
        keep_rows(draw, query[:, b], torch.full_like(query[:, b], head), first_key[b].expand(len(query)), num_keys)
        for b, head in itertools.product(range(query.shape[1]), heads)
    ]
    kept = torch.stack(rows)  # [b * heads, sq, sk]
    place = torch.arange(num_keys, device=query.device) - torch.arange(len(query), device=query.device)[:, None]
    if seen.right is not None:
        kept = kept & (place <= seen.right)
    if seen.left is not None:
        kept = kept & (place >= -seen.left)
    kept = torch.nn.functional.pad(kept, (0, -num_keys % 128, 0, -len(query) % 128))

    def words(kept: Tensor) -> Tensor:
        """[b * heads, m, n] to [b, heads, m, n / 128, 4]."""
        bits = kept.long().unflatten(2, (-1, 8, 2, 4, 2))  # a key is 16 * i + 8 * j + 2 * word + k
        i, j, k = (torch.arange(size, device=query.device) for size in (8, 2, 2))
        found = (bits << (i[:, None, None, None] + 8 * j[:, None, None] + 16 * k)).sum((3, 4, 6))
        return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32).unflatten(0, (-1, len(heads)))

    return KeepBits(
        words(kept).transpose(2, 3).contiguous() if by_query else None,
        words(kept.transpose(1, 2)).permute(0, 1, 3, 4, 2).contiguous() if by_key else None,
    )


def bits(rows: int = 200) -> None:
    """Checks dropout bits of calls with at most this number of queries."""
    draw = Draw((3123456789, 3987654321), torch.tensor(2**33 + 7, device=DEVICE), 0.37, bits=16)
    for queries, keys, seen in (
        (6, 170, SeenKeys(None, None)),
        (137, 137, SeenKeys(20, 3)),
        (32, 32, SeenKeys(None, 0)),
    ):
        if queries > rows:
            continue
        query = torch.arange(queries, device=DEVICE)[:, None] + torch.tensor([2**33], device=DEVICE)
        first_key = query[0] - queries % 32
        call = query, first_key, keys, range(5, 6), seen
        expected = reference_bits(draw, *call, True, True)
        in_sight = reference_bits(replace(draw, probability=0.0), *call, True, True)
        for orders in ((True, True), (True, False), (False, True)):
            found = keep_bits_triton(draw, *call, *orders)
            for asked, *bits in zip(orders, *map(astuple, (found, in_sight, expected)), strict=True):
                assert (bits[0] is not None) == asked
                if asked:
                    assert bits[1].any() and torch.equal(bits[0] & bits[1], bits[2]), (queries, keys, seen)


def problem(case: Case) -> tuple[list[Tensor], AttentionCall]:
    """Query, key, value, sink and the gradient of the output; and the call."""
    grows, widens = (8, 4) if ON_GPU else (1, 1)
    sq, sk = case.length * grows, (case.length + case.more_keys) * grows
    b, (a, g), (d, dv) = case.batch, case.heads, (width * widens for width in case.widths)
    generator = torch.Generator().manual_seed(0)
    shapes = (sq, b, a, d), (sk, b, g, d), (sk, b, g, dv), (a,), (sq, b, a, dv)
    tensors = [torch.randn(shape, generator=generator).to(DEVICE, DTYPE) for shape in shapes]
    tokens = dropout_tokens(Tokens(sq, b, sample_length=sq + 1, random=RngPosition(12, 7, 3)), DEVICE)
    edges = mask = None
    if case.packed:
        cuts = range(0, sq, case.variant.chunk) if case.variant.chunk else [0, 1, sq // 3, sq // 3, sq - 6]
        edges = torch.tensor([*cuts, sq], dtype=torch.int32, device=DEVICE)
    if case.hides:
        mask = (torch.arange(sk) >= torch.tensor([sk - 5, sk])[:, None]).to(DEVICE)[:, None, None]
    return tensors, AttentionCall(
        mask=mask,
        cu_seqlens=edges,
        max_seqlen=sq,
        sink=tensors[3] if case.variant.sink else None,
        dropout=DropoutRngPosition(tokens, 3, "attention") if case.variant.dropout else None,
        first_head=2,
    )


def bias_table(case: Case) -> Tensor:
    """A number for each bucket of distances and head, [8, a]."""
    return torch.randn(8, case.heads[0], generator=torch.Generator().manual_seed(1)).to(DEVICE)


def relative_bias(table: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return relative_position_bias(table, len(query), len(key), bidirectional=True, max_distance=20)


def use_small_tiles(patch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter compute several tiles in little time, with bits from their definition."""
    for tiles in ("_FORWARD_TILES", "_BACKWARD_TILES"):
        patch.setattr(flash_triton, tiles, {256: TileSize(32, 32, 4, 1)})
    patch.setattr(flash_triton, "keep_bits_triton", reference_bits)


def attention_of(name: str, kernel: Callable[..., Tensor] = flash_attention_triton) -> None:
    """Compares a kernel with the definition in float64: output and gradients."""
    case = CASES[name]
    tensors, call = problem(case)
    results = []
    for function, dtype in ((attention, torch.float64), (kernel, DTYPE)):
        leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in (*tensors[:4], bias_table(case))]
        its_call = replace(
            call,
            sink=leaves[3] if case.variant.sink else None,
            bias=relative_bias(leaves[4], leaves[0], leaves[1]) if case.variant.adds_bias else None,
        )
        output = function(*leaves[:3], case.variant, its_call)
        output.backward(tensors[4].to(dtype))
        results.append([output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    names = ["output", "query", "key", "value", "bias" if case.variant.adds_bias else "sink"]
    assert [len(result) for result in results] == 2 * [4 + case.variant.sink + case.variant.adds_bias]
    for what, exact, ours in zip(names, *results, strict=False):
        assert ours.dtype is DTYPE and ours.shape == exact.shape
        error = (ours.double() - exact).abs().max() / exact.abs().max()
        assert error < TOLERANCE, (name, what, float(error))


def in_order(name: str) -> None:
    """Does what `attention_of` does, in deterministic mode."""
    torch.use_deterministic_algorithms(True)
    try:
        attention_of(name)
    finally:
        torch.use_deterministic_algorithms(False)


def documents(kind: str) -> None:
    """Odd documents: single tokens, one as long as the row, empty ones, many, and tokens behind the last boundary."""
    length = 2048 if ON_GPU else 48
    cuts = {
        "single tokens": [*range(length // 2), length // 2 + 7, length],
        "one": [0, length],
        "many, some empty": sorted(
            torch.randint(0, length, (300,), generator=torch.Generator().manual_seed(2)).tolist()
        ),
        "tail": [0, 5, length // 3],
    }[kind]
    if kind.startswith("many"):
        cuts = [0, *cuts, length, length]
    case = Case(AttentionVariant(SCALE, True), length // 8 if ON_GPU else length, batch=1)
    tensors, call = problem(case)
    call = replace(call, cu_seqlens=torch.tensor(cuts, dtype=torch.int32, device=DEVICE), max_seqlen=length)
    results = []
    for function, dtype in ((attention, torch.float64), (flash_attention_triton, DTYPE)):
        leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in tensors[:3]]
        output = function(*leaves, case.variant, call)
        output.backward(tensors[4].to(dtype))
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for exact, ours in zip(*results, strict=True):
        # Single tokens have gradients of 0.
        assert (ours.double() - exact).abs().max() < TOLERANCE * exact.abs().max().clamp(min=0.1), kind


def heads_in_turns(patch: pytest.MonkeyPatch) -> None:
    """A call with too many dropout bits to keep gives the same numbers, some heads at a time."""
    case = CASES["causal, dropped"]
    tensors, call = problem(case)
    results = []
    for most in (flash_triton._LARGEST_BITS, 1):
        patch.setattr(flash_triton, "_LARGEST_BITS", most)
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        output = flash_attention_triton(*leaves, case.variant, call)
        output.backward(tensors[4])
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for whole, in_turns in zip(*results, strict=True):
        assert (whole.double() - in_turns.double()).abs().max() < 1e-2 * whole.double().abs().max()


def specialized_forward() -> None:
    """Calls of the forward with specialised warps, which Triton's interpreter does not run."""
    tokens = dropout_tokens(Tokens(256, 1, sample_length=256), DEVICE)
    dropped = BlockCall(dropout=DropoutRngPosition(tokens, 3, "attention"), row_start=tokens.index[:1])
    cuts = torch.tensor([0, 100, 256], dtype=torch.int32, device=DEVICE)
    for width, left, dropout, call in (
        (64, None, 0.0, BlockCall()),
        (128, None, 0.0, BlockCall()),
        (64, None, 0.1, dropped),
        (128, None, 0.1, dropped),
        (128, 50, 0.0, BlockCall(cuts, 156)),
    ):
        query, key = (torch.randn(256, 1, heads, width, device=DEVICE, dtype=DTYPE) for heads in (4, 2))
        offsets, variant = BlockOffsets(0, 0, left, 0), AttentionVariant(SCALE, True, dropout=dropout)
        flash_block_attention_triton(query, key, key, offsets, variant, call)


def blocks(packed: bool, drops: bool) -> None:
    """Blocks of queries and keys merge to the attention of whole rows, and their gradients add up."""
    case = CASES["packed, dropped" if packed else "causal, dropped"]
    if not drops:
        case = replace(case, variant=replace(case.variant, dropout=0.0), widths=(16, 16))
    (query, key, value, _, gradient), call = problem(case)
    sq, b, a, _ = query.shape
    row_start = call.dropout.tokens.index.view(sq, b)[0] if call.dropout else None
    block_call = BlockCall(call.cu_seqlens, sq, call.dropout, row_start, call.first_head)
    cut = sq // 2 + 3
    halves = slice(0, cut), slice(cut, sq)
    output = torch.zeros_like(gradient, dtype=torch.float32)
    lse = torch.full((b, a, sq), -torch.inf, device=DEVICE)
    jobs = [(q, k) for q, k in itertools.product(halves, halves) if k.start <= q.start]
    for q, k in jobs:
        offsets = BlockOffsets(q.start, k.start, None, None if k.start < q.start else 0)
        part = flash_block_attention_triton(query[q], key[k], value[k], offsets, case.variant, block_call)
        merge_block(output[q], lse[..., q], *part)
    totals = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, key, value)]
    for q, k in jobs:
        offsets = BlockOffsets(q.start, k.start, None, None if k.start < q.start else 0)
        tensors = gradient[q], query[q], key[k], value[k], output.to(DTYPE)[q], lse[..., q]
        parts = flash_block_attention_backward_triton(*tensors, offsets, case.variant, block_call)
        for total, rows, part in zip(totals, (q, k, k), parts, strict=True):
            total[rows] += part
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    exact = attention(*leaves, case.variant, call)
    expected = [exact.detach(), *torch.autograd.grad(exact, leaves, gradient.double())]
    for ours, theirs in zip((output, *totals), expected, strict=True):
        assert (ours.double() - theirs).abs().max() < TOLERANCE * theirs.abs().max()
