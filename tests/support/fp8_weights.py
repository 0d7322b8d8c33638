"""Checks that compare the kernels of gathered fp8 weights with their definitions, in Triton's interpreter or on a
GPU."""

import itertools

import torch
from support.fp8_kernels import DEVICE, matrix, same_bits
from torch import Tensor

from megatron.core.ops.fp8 import weight_blocks
from megatron.core.ops.fp8.formats import scale_for
from megatron.core.ops.fp8.weight_blocks import WeightBlocks
from megatron.core.ops.fp8.weight_blocks_triton import (
    cast_blocks_triton,
    largest_of_blocks_triton,
    transposed_codes_triton,
)

E4M3 = torch.float8_e4m3fn
CASES = (
    WeightBlocks.of(torch.Size((48, 80)), (0, 0)),
    WeightBlocks.of(torch.Size((3, 48, 80)), (0, 0)),
    WeightBlocks.of(torch.Size((144, 272)), (128, 128)),
    WeightBlocks.of(torch.Size((2, 144, 272)), (128, 128)),
)


def parts(blocks: WeightBlocks) -> list[tuple[int, int]]:
    """Flat ranges of a weight that begin and end inside blocks, groups and rows, as those of shards do."""
    end = blocks.groups * blocks.height * blocks.width
    cut = end * 5 // 9 // 64 * 64
    return [(0, end), (0, cut), (cut, end), (cut - 128, cut)]


def values_of(blocks: WeightBlocks, dtype: torch.dtype) -> Tensor:
    return matrix(blocks.groups * blocks.height, blocks.width, dtype).flatten()


def quantised_parts() -> None:
    """Main weights in float32 that round to bfloat16 and float16, and weights in these types."""
    types = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16))
    for blocks, (source, model) in itertools.product(CASES, types):
        _quantised(blocks, source, model, parts(blocks))


def a_few_quantised_parts() -> None:
    """One type of weights, and a part of each kind of blocks."""
    for blocks in CASES[1:3]:
        _quantised(blocks, torch.float32, torch.bfloat16, parts(blocks)[1:2])


def _quantised(blocks: WeightBlocks, source: torch.dtype, model: torch.dtype, ranges: list[tuple[int, int]]) -> None:
    whole = values_of(blocks, source)
    for start, stop in ranges:
        values, what = whole[start:stop], (blocks, source, model, start, stop)
        ours, exact = (torch.zeros(blocks.number, device=DEVICE) for _ in range(2))
        largest_of_blocks_triton(values, start, blocks, model, ours)
        weight_blocks.largest_of_blocks(values, start, blocks, model, exact)
        assert torch.equal(ours, exact), what
        for scales in (scale_for(exact, E4M3), scale_for(exact, E4M3)[0]):
            codes = [torch.zeros(stop - start, dtype=torch.uint8, device=DEVICE).view(E4M3) for _ in range(2)]
            cast_blocks_triton(values, start, blocks, model, scales, codes[0])
            weight_blocks.cast_blocks(values, start, blocks, model, scales, codes[1])
            same_bits(codes[0], codes[1], what)


def values_that_are_not_finite() -> None:
    blocks = WeightBlocks.of(torch.Size((2, 16, 64)), (0, 0))
    whole = values_of(blocks, torch.float32)
    whole[1500], whole[3] = torch.nan, 3e38
    found = torch.zeros(2, device=DEVICE)
    largest_of_blocks_triton(whole, 0, blocks, torch.bfloat16, found)
    assert found[1].isnan() and found[0] == whole[3].bfloat16().float()


def transposed() -> None:
    for shape, multiple in itertools.product(((1, 48, 80), (3, 144, 272), (2, 16, 16)), (1, 128)):
        codes = torch.arange(shape[0] * shape[1] * shape[2], device=DEVICE).to(torch.uint8).view(E4M3).view(shape)
        ours = transposed_codes_triton(codes, multiple).view(torch.uint8)
        assert torch.equal(ours, weight_blocks.transposed_codes(codes, multiple).view(torch.uint8)), (shape, multiple)


CHECKS = (quantised_parts, a_few_quantised_parts, values_that_are_not_finite, transposed)
