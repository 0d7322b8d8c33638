"""Definitions of grouped products in fp8: each segment of rows is quantised and multiplied as a matrix of its own."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron.core.ops.fp8.formats import scale_for
from megatron.core.ops.fp8.grouped import (
    QuantizedGroups,
    QuantizedGroupsPair,
    Segments,
    accumulate_product_of_groups,
    cast_segments,
    largest_of_segments,
    product_of_groups,
    quantize_segment_blocks,
)
from megatron.core.ops.fp8.quantize import Quantized, cast_scaled, dequantize, quantize_blocks
from megatron.core.ops.moe.grouped_linear import RowGroups

BY_SOURCE = torch.tensor([[5, 130], [0, 0], [140, 3]])
ROWS = int(BY_SOURCE.sum())
E4M3 = torch.float8_e4m3fn


def segments() -> Segments:
    return Segments.of_rows(RowGroups.of_sources(BY_SOURCE.t()), ROWS)


def matrix(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_segments_are_padded_to_whole_blocks() -> None:
    found = segments()
    assert (found.number, found.groups, found.per_group) == (6, 3, 2)
    assert list(found.sizes) == [5, 130, 0, 0, 140, 3]
    assert found.ends.tolist() == [5, 135, 135, 135, 275, 278]
    assert found.block_ends.tolist() == [1, 3, 3, 3, 5, 6]
    assert found.of_blocks[:6].tolist() == [0, 1, 1, 4, 4, 5] and (found.of_blocks[6:] == 6).all()
    assert found.padded_rows == 128 * found.blocks and found.blocks >= 6
    weight = Segments.of_weight(torch.empty(3, 130, 16))
    assert weight.blocks == 6 and weight.block_ends.tolist() == [2, 4, 6]


def test_each_segment_is_cast_as_a_matrix_of_its_own() -> None:
    x, found = matrix(ROWS, 48), segments()
    amax = largest_of_segments(x, found)
    one, seen = scale_for(x.abs().amax(), E4M3), torch.zeros(())
    for rows_scale, columns_scale in (
        (one, one),
        (scale_for(amax, E4M3), scale_for(amax, E4M3)),
    ):
        rows, transposed = cast_segments(x, E4M3, found, rows_scale, columns_scale, seen)
        assert rows is not None and transposed is not None and seen == x.abs().max()
        for number, part, padded in found.ranges():
            assert amax[number] == x[part].abs().max()
            scales = [one, one] if rows_scale.dim() == 0 else [rows_scale[number], columns_scale[number]]
            expected = cast_scaled(x[part], E4M3, *scales)
            assert expected[0] is not None and expected[1] is not None
            assert torch.equal(rows[part].view(torch.uint8), expected[0].view(torch.uint8))
            assert torch.equal(transposed[:, padded].view(torch.uint8), expected[1].view(torch.uint8))
    behind = transposed.float()
    for _, _, padded in found.ranges():
        behind[:, padded] = 0
    assert not behind.any()  # padding adds nothing to a product


@pytest.mark.parametrize("square", [False, True])
def test_blocks_do_not_cross_segments(square: bool) -> None:
    x, found = matrix(ROWS, 144), segments()
    pair = quantize_segment_blocks(x, E4M3, found, 1, square=square, rows=True, columns=True)
    assert pair.rows is not None and pair.columns is not None
    for _, part, padded in found.ranges():
        expected = quantize_blocks(x[part], E4M3, 1, square=square, rows=True, columns=True)
        assert expected.rows is not None and expected.columns is not None
        blocks = slice(padded.start // 128, -(-padded.stop // 128))
        assert torch.equal(pair.rows.values[part].float(), expected.rows.values.float())
        assert torch.equal(pair.rows.factors[blocks if square else padded], expected.rows.factors)
        assert torch.equal(pair.columns.values[:, padded].float(), expected.columns.values.float())
        assert torch.equal(pair.columns.factors[:, blocks], expected.columns.factors)


@pytest.mark.parametrize(("kind", "transposed"), itertools.product(["all", "segments", "blocks"], [False, True]))
def test_products_are_those_of_each_groups_matrices(kind: str, transposed: bool) -> None:
    """Compared with float64 products of the matrices that the dense definitions dequantise."""
    x, w, found = matrix(ROWS, 144), matrix(3 * 144, 144 + 16, 2), segments()
    if not transposed:
        w = matrix(3 * 160, 144, 2)
    stacked = Segments.of_weight(w.view(3, -1, w.shape[1]))
    left, right = quantized(x, found, kind, False).rows, quantized(w, stacked, kind, kind == "blocks")
    weight = right.columns if transposed else right.rows
    assert left is not None and weight is not None
    output = product_of_groups(left, weight, found, torch.float64, transposed=transposed)
    for number, part, _ in found.ranges():
        alone = dense(x[part], kind, x)
        group = number // 2
        matrix_of = w.view(3, -1, w.shape[1])[group]
        other = dense(matrix_of, kind, w, square=True)
        expected = alone[0] @ (other[1] if transposed else other[0]).t()
        torch.testing.assert_close(output[part], expected)


@pytest.mark.parametrize("kind", ["all", "segments", "blocks"])
def test_weight_gradients_are_sums_over_the_segments_of_a_group(kind: str) -> None:
    dy, x, found = matrix(ROWS, 32), matrix(ROWS, 48, 2), segments()
    left, right = (quantized(given, found, kind, False).columns for given in (dy, x))
    assert left is not None and right is not None
    total = torch.ones(3, 32, 48, dtype=torch.float64)
    expected = total.clone()
    accumulate_product_of_groups(total, left, right, found)
    for number, part, _ in found.ranges():
        expected[number // 2] += dense(dy[part], kind, dy)[1] @ dense(x[part], kind, x)[1].t()
    torch.testing.assert_close(total, expected)


def quantized(x: Tensor, found: Segments, kind: str, square: bool) -> QuantizedGroupsPair:
    if kind == "blocks":
        return quantize_segment_blocks(x, E4M3, found, 0, square=square, rows=True, columns=True)
    amax = x.abs().amax() if kind == "all" else largest_of_segments(x, found)
    scales = [scale_for(amax, E4M3)] * 2
    values = cast_segments(x, E4M3, found, *scales)
    pairs = zip(values, scales, strict=True)
    return QuantizedGroupsPair(*(QuantizedGroups(value, 1.0 / scale, kind) for value, scale in pairs))  # type: ignore[arg-type]


def dense(part: Tensor, kind: str, whole: Tensor, square: bool = False) -> list[Tensor]:
    """Returns a matrix and its transpose as the dense definitions round them, in float64."""
    if kind == "blocks":
        pair = quantize_blocks(part, E4M3, 0, square=square, rows=True, columns=True)
        assert pair.rows is not None and pair.columns is not None
        return [dequantize(given, torch.float64) for given in (pair.rows, pair.columns)]
    amax = whole.abs().amax() if kind == "all" else part.abs().amax()
    scales = [scale_for(amax, E4M3)] * 2
    values = cast_scaled(part, E4M3, *scales)
    factors = [1.0 / scale for scale in scales]
    return [
        dequantize(Quantized(value, factor), torch.float64)
        for value, factor in zip(values, factors, strict=True)
        if value is not None
    ]
