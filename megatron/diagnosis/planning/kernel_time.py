"""The seconds that a GPU needs for the work of a micro-batch.

Products: a GPU computes tiles of 128 x 256 outputs, one on each multiprocessor at a time, in steps of the inner length;
its last round of tiles is not full, and each tile has a beginning and an end that cost as much as `_TILE_ENDS` further
inner elements. A product is never faster than its bytes. Attention: channels are multiplied at one rate, and each pair
of a query and a key costs an exponential; tiles on the diagonal are half empty. Other operations move their bytes.
docs/decisions/step-time.md compares these rules with measurements.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.figures import Figure, total
from megatron.diagnosis.planning.gpus import Gpu
from megatron.diagnosis.planning.work import AttentionWork, Product, Selection, Work

_TILE = (128, 256)
_TILE_ENDS = 80
"""In fp8 twice as much, because the beginning and the end take as long as in bf16."""
_SPLIT = 1024
"""Inner elements of a part of a product that a multiprocessor computes by itself."""
_LAUNCH = 3e-6
"""Seconds between two kernels in which the GPU is not full."""
_GROUPED, _GROUPED_FP8 = 0.9, 0.75
"""Speed of the products of experts, as part of that of one product of the same FLOPs (measure_experts.py: 88%, with
what is added to gradients; in fp8 from the row MOE64 in fp8 of benchmarks/results/h200.json)."""
_DIAGONAL = 12.9
"""Attention computes, beyond the pairs that count, as many keys for a query as half of this times the channels."""
_CACHE, _BEYOND_CACHE = 60e6, 1.2
"""Bytes of a GPU's cache, and how many times as long attention takes if the keys and values of a head do not fit (the
rows LLAMA1B_256K and LLAMA8B_128K, 67 MB; 34 MB in LLAMA1B_128K take what shorter rows do)."""
_SELECTS = 4.1
"""How many times as long attention takes if an indexer selects keys: our kernel computes 1.3 times the products, at a
third of the rate (from the row DSA: what its other parts leave)."""
_CHOICE = 170
"""Bytes that the choice of the best keys moves for each score: masks of causality and documents, comparisons and counts
are tensors of all pairs, and topk reads its rows 18 times."""
_STATES = {"mamba": 6.0e12, "gated_delta_net": 3.2e12}
"""Numbers of the states that forward and backward of a scan move in a second on a GPU whose copy moves 4.2 TB/s."""
_COPY_OF_STATES = 4.2e12
_ELEMENTWISE = 0.93
"""Rate of memory-bound kernels, as part of that of a copy (measure_kernels.py: 62% to 105%)."""
_FORWARD_OF_ATTENTION = 0.26
"""Part of its time that attention spends in forward (bench.py --floor: 24% to 29%)."""


@dataclass(frozen=True)
class Passes:
    """The time of one kind of work in the three computations of a pipeline schedule."""

    kind: str
    forward: Figure
    input_gradient: Figure
    weight_gradient: Figure

    @property
    def whole(self) -> Figure:
        """Time of forward and backward."""
        return total([self.forward, self.input_gradient, self.weight_gradient])


def passes_of(work: Work, gpu: Gpu) -> list[Passes]:
    """Returns the time of a micro-batch's work by kind. Raises UserError if the GPU has no rate for it."""
    nothing = Figure(0.0, "no such work")
    found = [_products(work.products.items(), gpu)]
    attention = total(_attention(each, gpu).times(count) for each, count in work.attention.items())
    first = attention.times(_FORWARD_OF_ATTENTION)
    found.append(Passes("attention", first, attention.times(1 - _FORWARD_OF_ATTENTION), nothing))
    scores = total(_scores(each, gpu).times(count) for each, count in work.selections.items())
    found.append(Passes("choice of keys", scores, nothing, nothing))
    states = total(
        Figure(count / _STATES[kind] * _COPY_OF_STATES / gpu.copy.value, f"scans of {kind} on an H200", 0.25)
        for kind, count in work.states.items()
    )
    found.append(Passes("scans", states.times(0.25), states.times(0.75), nothing))
    rate = elementwise_rate(gpu)
    forward, backward = (
        Figure(rate.per(each.total()).value + work.kernels / 2 * _LAUNCH, rate.source, rate.error)
        for each in (work.forward_bytes, work.backward_bytes)
    )
    found.append(Passes("memory-bound operations", forward, backward, nothing))
    # Each matrix is read once and written in both layouts.
    cast = rate.per(
        sum(4 * count * each.rows * (each.inputs + each.outputs) for each, count in work.products.items() if each.fp8)
    )
    found.append(Passes("casts to fp8", cast.times(0.5), cast.times(0.5), nothing))
    return found


def elementwise_rate(gpu: Gpu) -> Figure:
    """Returns the bytes that memory-bound kernels move in a second."""
    copy = gpu.copy
    source = f"{_ELEMENTWISE:.0%} of a copy; {copy.source}"
    return Figure(copy.value * _ELEMENTWISE, source, copy.error + 0.1)


def _products(products: Iterable[tuple[Product, int]], gpu: Gpu) -> Passes:
    times: tuple[list[Figure], ...] = ([], [], [])
    for each, count in products:
        shapes = (
            (each.rows, each.outputs, each.inputs),
            (each.rows, each.inputs, each.outputs),
            (each.outputs, each.inputs, each.rows),
        )
        for number, shape in enumerate(shapes):
            if number and not each.backward[number - 1]:
                continue
            times[number].append(product_seconds(each, shape, gpu, gradient=number == 2).times(count))
    return Passes("products", *map(total, times))


def product_seconds(each: Product, shape: tuple[int, int, int], gpu: Gpu, gradient: bool = False) -> Figure:
    """Returns the time of a product of rows x columns outputs and an inner length. `gradient`: it is added to a float32
    gradient of the weight."""
    rate = gpu.fp8_products if each.fp8 else gpu.bf16_products
    if rate is None:
        raise UserError(f"the record of {gpu.name} has no rate of fp8 products: leave --fp8-format out")
    rows, columns, inner = shape
    item = 1 if each.fp8 else each.dtype.itemsize
    value = rate.value / (1 if item < 4 else 2 * item)  # float32 products use TF32 or no tensor cores at all
    flops = 2.0 * rows * columns * (inner + _TILE_ENDS * (2 if each.fp8 else 1))
    if each.experts:
        compute = flops / (_GROUPED_FP8 if each.fp8 else _GROUPED) / value
    else:
        tiles = min(_tiles(rows, columns), _tiles(columns, rows)) * max(1, inner // _SPLIT)
        compute = flops * math.ceil(tiles / gpu.multiprocessors) * gpu.multiprocessors / tiles / value
    weights = each.weights if each.experts else 1
    read = item * inner * (rows + columns * weights) if not gradient else item * inner * (rows + columns)
    written = 8 * rows * columns * weights if gradient else 2 * rows * columns
    if gradient and each.experts and not each.fp8:  # the totals of experts are read and written after their products
        compute, written = compute + written / gpu.copy.value, 0
    return Figure(max(compute, (read + written) / gpu.copy.value) + _LAUNCH, rate.source, rate.error)


def _tiles(rows: int, columns: int) -> int:
    return math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])


def _attention(each: AttentionWork, gpu: Gpu) -> Figure:
    """Returns the time of forward and backward."""
    channels, exponential = _attention_constants(gpu)
    width = (each.width + each.value_width) / 2
    row = 2 * each.keys / each.blocks  # tokens
    slower = _BEYOND_CACHE if 2 * row * (each.width + each.value_width) > _CACHE else 1.0
    seconds = slower * 3.5 * each.flops * (channels + exponential / width) * (1 + _DIAGONAL * width / row)
    source = gpu.attention_64 if width <= 96 else gpu.attention_128
    if each.selects:
        why = f"{_SELECTS} times as long as without a selection, row DSA; {source.source}"
        return Figure(_SELECTS * seconds, why, source.error + 0.12)
    return Figure(seconds + 2 * each.blocks * _LAUNCH, source.source, source.error + 0.03)


def _scores(each: Selection, gpu: Gpu) -> Figure:
    """Returns the time in which an indexer scores keys, at the rate of attention, and the best keys are chosen."""
    rate, moved = gpu.attention_128, elementwise_rate(gpu)
    scores = Figure(each.flops / rate.value, f"scores of keys at the rate of attention; {rate.source}", 0.3)
    return total([scores, moved.per(_CHOICE * each.pairs)])


def _attention_constants(gpu: Gpu) -> tuple[float, float]:
    """Returns the seconds of a floating point operation in the limit of wide heads, and what narrow heads cost in
    addition, for one channel. They follow from the two measured rates of a GPU."""
    narrow = 1 / gpu.attention_64.value / (1 + _DIAGONAL * 64 / 4096)
    wide = 1 / gpu.attention_128.value / (1 + _DIAGONAL * 128 / 8192)
    exponential = (narrow - wide) / (1 / 64 - 1 / 128)
    return wide - exponential / 128, exponential
