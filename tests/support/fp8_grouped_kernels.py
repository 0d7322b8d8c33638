"""Checks that compare the kernels of grouped products in fp8 with their definitions. They run in Triton's interpreter
or on a GPU."""

import itertools

import torch
from support.fp8_kernels import DEVICE, matrix, same_bits
from torch import Tensor

from megatron.core.ops.fp8 import grouped
from megatron.core.ops.fp8.formats import scale_for
from megatron.core.ops.fp8.grouped import QuantizedGroups, QuantizedGroupsPair, Segments
from megatron.core.ops.fp8.grouped_product_triton import (
    Tile,
    accumulate_product_of_groups_triton,
    product_of_groups_triton,
)
from megatron.core.ops.fp8.grouped_quantize_triton import (
    cast_segments_triton,
    largest_of_segments_triton,
    quantize_segment_blocks_triton,
    quantize_segments_by_largest_triton,
)
from megatron.core.ops.moe.grouped_linear import RowGroups

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCOPES = ("all", "segments", "blocks")


def segments(counts: tuple[tuple[int, ...], ...] = ((5, 130), (0, 0), (140, 3))) -> Segments:
    by_source = torch.tensor(counts, device=DEVICE)
    return Segments.of_rows(RowGroups.of_sources(by_source.t()), int(by_source.sum()))


def same_columns(ours: Tensor | None, exact: Tensor | None, found: Segments, what: object) -> None:
    """Compares transposed matrices up to the last segment, with the zeros that pad each segment."""
    assert ours is not None and exact is not None
    used = 128 * int(found.block_ends[-1])
    same_bits(ours[:, :used], exact[:, :used], what)


def largest_values() -> None:
    found = segments()
    for k, dtype in ((48, torch.bfloat16), (144, torch.float32)):
        x = matrix(found.rows, k, dtype)
        assert torch.equal(largest_of_segments_triton(x, found), grouped.largest_of_segments(x, found))


def casts() -> None:
    found, x = segments(), matrix(278, 80 if DEVICE.type == "cuda" else 48)
    for dtype, wanted in ((E4M3, (True, True)), (E5M2, (True, False)), (E5M2, (False, True))):
        for scales in scales_of(x, found, dtype):
            seen = [torch.full((), 0.5, device=DEVICE) for _ in range(2)]
            given = [scale if wants else None for scale, wants in zip(scales, wanted, strict=True)]
            ours = cast_segments_triton(x, dtype, found, *given, seen[0])
            exact = grouped.cast_segments(x, dtype, found, *given, seen[1])
            same_bits(ours[0], exact[0], (dtype, wanted))
            if wanted[1]:
                same_columns(ours[1], exact[1], found, (dtype, wanted))
            assert torch.equal(*seen)
    x[3, 5] = torch.nan
    x[140, 7] = torch.inf
    one = torch.ones((), device=DEVICE)
    for values in cast_segments_triton(x, E4M3, found, one, one):
        assert values is not None
        used = values[:, : 128 * int(found.block_ends[-1])]
        assert int(used.float().isnan().sum()) == 2


def by_largest() -> None:
    """Checks scales that the kernel finds itself, also that of an expert without rows."""
    found, x = segments(), matrix(278, 80 if DEVICE.type == "cuda" else 48)
    largest = grouped.largest_of_segments(x, found)
    assert (largest == 0).any()
    for dtype, margin, wanted in ((E4M3, 0, (True, True)), (E5M2, 1, (True, False)), (E5M2, 0, (False, True))):
        keywords = dict(zip(("rows", "columns"), wanted, strict=True))
        ours = quantize_segments_by_largest_triton(x, dtype, found, margin, largest, **keywords)
        exact = grouped.quantize_segments_by_largest(x, dtype, found, margin, largest, **keywords)
        for one, other in ((ours.rows, exact.rows), (ours.columns, exact.columns)):
            assert (one is None) == (other is None), wanted
            if one is not None and other is not None:
                assert one.scope == other.scope
                assert torch.equal(one.factors, other.factors), wanted
        if ours.rows is not None and exact.rows is not None:
            same_bits(ours.rows.values, exact.rows.values, wanted)
        if ours.columns is not None and exact.columns is not None:
            same_columns(ours.columns.values, exact.columns.values, found, wanted)


def scales_of(x: Tensor, found: Segments, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Returns the scales of rows and columns for each scope but blocks."""
    whole = scale_for(x.abs().amax(), dtype)
    each = scale_for(grouped.largest_of_segments(x, found), dtype)
    return [(whole, whole), (each, each)]


def blocks() -> None:
    found, x = segments(), matrix(278, 144)
    x[:, :8] = 0.0
    for dtype, square, margin in ((E4M3, True, 0), (E5M2, False, 1)):
        for rows, columns in ((True, True), (False, True)):
            wanted = {"square": square, "rows": rows, "columns": columns}
            ours = quantize_segment_blocks_triton(x, dtype, found, margin, **wanted)
            exact = grouped.quantize_segment_blocks(x, dtype, found, margin, **wanted)
            used = int(found.block_ends[-1])
            if ours.rows is not None and exact.rows is not None:
                same_bits(ours.rows.values, exact.rows.values, wanted)
                for _, _, padded in found.ranges():
                    heights = slice(padded.start // 128, -(-padded.stop // 128)) if square else padded
                    assert torch.equal(ours.rows.factors[heights], exact.rows.factors[heights]), wanted
            assert ours.columns is not None and exact.columns is not None
            same_columns(ours.columns.values, exact.columns.values, found, wanted)
            assert torch.equal(ours.columns.factors[:, :used], exact.columns.factors[:, :used]), wanted


def quantized(x: Tensor, found: Segments, scope: str, dtype: torch.dtype, square: bool = False) -> QuantizedGroupsPair:
    """Returns a matrix as the definitions quantise it."""
    if scope == "blocks":
        return grouped.quantize_segment_blocks(x, dtype, found, 0, square=square, rows=True, columns=True)
    scales = scales_of(x, found, dtype)[SCOPES.index(scope)]
    values = grouped.cast_segments(x, dtype, found, *scales)
    pairs = zip(values, scales, strict=True)
    return QuantizedGroupsPair(*(QuantizedGroups(value, 1.0 / scale, scope) for value, scale in pairs))  # type: ignore[arg-type]


def products() -> None:
    """Checks odd widths, partly filled blocks, an expert without rows, and both orientations of the weights."""
    found = segments()
    for scope, transposed in itertools.product(SCOPES, (False, True)):
        k, out = (144, 160) if DEVICE.type == "cuda" or scope == "blocks" else (48, 80)
        dtype = E5M2 if transposed else E4M3
        x, w = matrix(found.rows, k), matrix(3 * (k if transposed else out), out if transposed else k)
        stacked = Segments.of_weight(w.view(3, -1, w.shape[1]))
        rows = quantized(x, found, scope, dtype).rows
        pair = quantized(w, stacked, scope, E4M3, square=scope == "blocks")
        weight = pair.columns if transposed else pair.rows
        assert rows is not None and weight is not None
        exact = grouped.product_of_groups(rows, weight, found, torch.float32, transposed=transposed)
        for precise in (True, False):
            # 256 outputs of float32 beside the operands do not fit into the shared memory of a persistent program.
            tile = None if precise else Tile(128, 128, 3, 8, persistent=True)
            ours = product_of_groups_triton(
                rows, weight, found, torch.float32, transposed=transposed, precise=precise, tile=tile
            )
            close(ours, exact, precise or scope == "blocks", (scope, transposed, precise))


def weight_gradients() -> None:
    """Checks segments with scales of their own, groups without rows, and that the product is added."""
    for found in (segments(), segments(((70,), (0,), (129,)))):
        for scope in SCOPES:
            dy, x = matrix(found.rows, 48), matrix(found.rows, 80)
            left, right = quantized(dy, found, scope, E5M2).columns, quantized(x, found, scope, E4M3).columns
            assert left is not None and right is not None
            exact, ours = (torch.ones(3, 48, 80, device=DEVICE) for _ in range(2))
            grouped.accumulate_product_of_groups(exact, left, right, found)
            tile = Tile(128, 128, 4, 8, persistent=scope == "all")
            accumulate_product_of_groups_triton(ours, left, right, found, tile=tile)
            assert torch.equal(ours[1], torch.ones_like(ours[1]))
            close(ours - 1, exact - 1, True, (scope, found.per_group))


def close(ours: Tensor, exact: Tensor, precise: bool, what: object) -> None:
    """The units of a GPU keep about 14 bits of a sum; Triton's interpreter adds in float32."""
    error = float((ours.double() - exact.double()).norm() / exact.double().norm())
    assert error < (1e-6 if DEVICE.type == "cpu" else 1e-3 if precise else 3e-3), (what, error)
