"""Checks of the tiles of grouped products in fp8. They run in Triton's interpreter or on a GPU."""

import dataclasses
import functools

import torch
from support.fp8_grouped_kernels import E4M3, E5M2, quantized, segments
from support.fp8_kernels import DEVICE
from support.hopper_fp8_sums import largest_possible_errors, sums_of_products
from torch import Tensor

from megatron.core.ops.fp8 import grouped
from megatron.core.ops.fp8.formats import BLOCK
from megatron.core.ops.fp8.grouped import QuantizedGroups, Segments
from megatron.core.ops.fp8.grouped_product_triton import (
    TILES,
    Tile,
    Tiles,
    accumulate_product_of_groups_triton,
    product_of_groups_triton,
    specialized_kernels,
)
from megatron.core.utils.torch_private import scaled_mm


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Rows of each expert, and the inputs and outputs of a product."""

    counts: tuple[int, ...]
    k: int
    out: int
    squares: bool = False
    """The first rows of each expert are rows of its weight, so that some sums have only positive terms."""


KINDS = tuple(field.name for field in dataclasses.fields(Tiles))
OTHER_TILES = {"fast": Tile(128, 256, 3, 8), "precise": Tile(128, 128, 4, 8), "weight": Tile(128, 128, 4, 8)}
"""Slower tiles, which must compute the same bits on a GPU."""
TILES_OF_KINDS = (*((kind, getattr(TILES, kind)) for kind in KINDS), *OTHER_TILES.items())
"""What a product is, and a tile that computes it."""
FAST_TILES = tuple((kind, tile) for kind, tile in TILES_OF_KINDS if kind.startswith("fast"))
"""Those whose sums have few bits on Hopper."""
SMALL = Sizes((1, 300, 0, 129), 144, 272)
MOE64 = Sizes((0, 1, 127, 129, 4095, 1000, 3000, 4104), 2048, 2048)
"""The first product of the experts of MOE64, with fewer experts."""
MOE64_SECOND = dataclasses.replace(MOE64, k=1024)
SQUARES = Sizes((0, 129, 2048, 1000), 2048, 2048, squares=True)
SAMPLE = 8
"""Rows of each expert whose sums are compared bit for bit."""
MANY_ROWS = 2048
"""Experts with so many rows are compared with cuBLAS. Products of fewer rows it may split into several sums."""


@dataclasses.dataclass(frozen=True)
class Operands:
    """The quantised operands of a product, and what it is in float64: [n, out]."""

    rows: QuantizedGroups
    weight: QuantizedGroups
    found: Segments
    transposed: bool
    exact: Tensor

    def product(self, tile: Tile | None, dtype: torch.dtype, precise: bool) -> Tensor:
        """Returns what a tile computes."""
        given = self.rows, self.weight, self.found, dtype
        return product_of_groups_triton(*given, transposed=self.transposed, precise=precise, tile=tile)

    def weight_of(self, group: int) -> tuple[Tensor, Tensor]:
        """Returns the weight of an expert, fp8 [out, k], and its factor or factors, float32 [] or [out]."""
        (_, k), values, factors = self.rows.values.shape, self.weight.values, self.weight.factors
        if self.transposed:
            first = group * -(-k // BLOCK) * BLOCK
            return values[:, first : first + k].contiguous(), factors[group]
        own = slice(group * self.exact.shape[1], (group + 1) * self.exact.shape[1])
        return values[own], factors[group] if factors.dim() == 1 else factors[own, 0]

    def factors_of(self, group: int, rows: Tensor) -> Tensor:
        """Returns the factors of some rows of an expert: float32 [] or [rows, 1]."""
        return self.rows.factors[group] if self.rows.factors.dim() == 1 else self.rows.factors[rows]


def random_matrix(seed: int, n: int, k: int) -> Tensor:
    """Normal numbers whose rows and columns have different sizes, drawn on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows, columns = torch.arange(n, device=DEVICE), torch.arange(k, device=DEVICE)
    values = torch.randn(n, k, generator=generator, device=DEVICE)
    return (values * torch.exp2(rows[:, None] % 7 - columns % 5.0)).bfloat16()


@functools.cache
def operands(sizes: Sizes, scope: str, transposed: bool) -> Operands:
    found, k, out = segments(tuple((count,) for count in sizes.counts)), sizes.k, sizes.out
    x = random_matrix(1, found.rows, k)
    w = random_matrix(2, found.groups * out, k).view(found.groups, out, k)
    for group, part, _ in found.ranges() if sizes.squares else ():
        own = x[part][:out]
        w[group, : len(own)] = own
    stacked = (w.transpose(1, 2) if transposed else w).contiguous()
    rows = quantized(x, found, scope, E5M2 if transposed else E4M3).rows
    pair = quantized(stacked.flatten(0, 1), Segments.of_weight(stacked), scope, E4M3, square=scope == "blocks")
    weight = pair.columns if transposed else pair.rows
    assert rows is not None and weight is not None
    exact = grouped.product_of_groups(rows, weight, found, torch.float64, transposed=transposed)
    return Operands(rows, weight, found, transposed, exact)


@functools.cache
def gradient_operands(sizes: Sizes, scope: str, parts: bool) -> tuple[QuantizedGroups, QuantizedGroups, Segments]:
    """Returns the operands of a weight gradient; `parts`: each expert has two segments."""
    found = segments(tuple((count - count // 3, count // 3) if parts else (count,) for count in sizes.counts))
    left = quantized(random_matrix(3, found.rows, sizes.out), found, scope, E5M2).columns
    right = quantized(random_matrix(4, found.rows, sizes.k), found, scope, E4M3).columns
    assert left is not None and right is not None
    return left, right, found


def tiles() -> None:
    for kind, tile in TILES_OF_KINDS:
        tile_of(kind, tile, SMALL)


def tile_of(kind: str, tile: Tile, sizes: Sizes) -> None:
    """Compares what a tile computes with the definition in float64, row by row. On a GPU it must equal, bit for bit,
    what another tile of this kind computes."""
    scopes = {"blocks": ("blocks",), "weight_parts": ("segments", "blocks")}.get(kind, ("segments",))
    other = OTHER_TILES.get(kind, tile)
    for scope in scopes:
        if kind.startswith("weight"):
            given = gradient_operands(sizes, scope, kind == "weight_parts")
            exact = gradient_in_float64(*given)
            ours = gradients_by(tile, *given, exact)
            row_errors(ours, exact, 2e-3, (kind, tile, scope))
            if DEVICE.type == "cuda" and tile != other:
                assert torch.equal(ours, gradients_by(other, *given, exact)), (kind, tile, scope)
            continue
        dtype = torch.float32 if kind == "fast_float32" else torch.bfloat16
        for transposed in (False, True):
            chosen, precise = operands(sizes, scope, transposed), not kind.startswith("fast")
            ours = chosen.product(tile, dtype, precise)
            row_errors(ours, chosen.exact, 5e-3, (kind, tile, scope, transposed))
            if DEVICE.type == "cuda" and tile != other:
                assert torch.equal(ours, chosen.product(other, dtype, precise)), (kind, tile, scope, transposed)


def specialized_blocks(sizes: Sizes, variants: tuple[bool, ...] = (False, True)) -> None:
    """Compares the kernels of blocks with specialised warps with the definition in float64, row by row. A second call
    must compute the same bits. `variants`: whether weights are transposed, and whether experts have two segments."""
    for transposed in variants:
        chosen = operands(sizes, "blocks", transposed)
        assert specialized_kernels(chosen.rows, chosen.weight) is not None
        ours = chosen.product(None, torch.bfloat16, precise=False)
        row_errors(ours, chosen.exact, 5e-3, (sizes, transposed))
        assert torch.equal(ours, chosen.product(None, torch.bfloat16, precise=False)), (sizes, transposed)
    for parts in variants:
        given = gradient_operands(sizes, "blocks", parts)
        exact = gradient_in_float64(*given)
        ours = gradients_by(None, *given, exact)
        row_errors(ours, exact, 2e-3, (sizes, parts))
        assert torch.equal(ours, gradients_by(None, *given, exact)), (sizes, parts)


def small_specialized_blocks() -> None:
    specialized_blocks(SMALL)


def few_specialized_blocks() -> None:
    specialized_blocks(SMALL, (True,))


def gradients_by(
    tile: Tile | None, left: QuantizedGroups, right: QuantizedGroups, found: Segments, exact: Tensor
) -> Tensor:
    """Returns what a tile adds to a weight gradient, [experts * out, k]. Each row starts with values as large as those
    that are added (`exact`): float32 would round small rows to multiples of 2^-24 beside ones. Rows to which zeros are
    added start with ones."""
    size = exact.norm(dim=1, keepdim=True).float() / exact.shape[1] ** 0.5
    start = torch.where(size == 0, 1.0, size).expand(exact.shape)
    total = start.reshape(found.groups, left.values.shape[0], right.values.shape[0]).clone()
    accumulate_product_of_groups_triton(total, left, right, found, tile=tile)
    return total.flatten(0, 1) - start


def gradient_in_float64(left: QuantizedGroups, right: QuantizedGroups, found: Segments) -> Tensor:
    shape = found.groups, left.values.shape[0], right.values.shape[0]
    exact = torch.zeros(shape, device=DEVICE, dtype=torch.float64)
    grouped.accumulate_product_of_groups(exact, left, right, found)
    return exact.flatten(0, 1)


def errors_of_rows(ours: Tensor, exact: Tensor) -> Tensor:
    """Returns the error of each row as a share of its norm; rows of zeros must be exact."""
    errors, sizes = (ours.double() - exact).norm(dim=1), exact.norm(dim=1)
    empty = sizes == 0
    assert not errors[empty].any()
    return (errors / sizes)[~empty]


def row_errors(ours: Tensor, exact: Tensor, most: float, what: object) -> None:
    """Compares rows: a wrong tile is not hidden among right ones."""
    error = float(errors_of_rows(ours, exact).max())
    assert error < most, (what, error)


def one_of_each_kind() -> None:
    """Calls a product of each kind, in the order of KINDS, and a weight gradient with a scale for each block."""
    sizes = Sizes((5,), 16, 16)
    for dtype, precise in ((torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)):
        operands(sizes, "segments", False).product(None, dtype, precise)
    operands(sizes, "blocks", False).product(None, torch.float32, False)
    for scope, parts in (("segments", False), ("segments", True), ("blocks", False)):
        left, right, found = gradient_operands(sizes, scope, parts)
        accumulate_product_of_groups_triton(torch.zeros(1, 16, 16, device=DEVICE), left, right, found)


# ---------------------------------------------------------------------------------------------------------------------
# Sums of few bits, on a GPU


def differs_from_hopper(chosen: Operands, ours: Tensor) -> tuple[int, float]:
    """Compares some rows of each expert with the model of Hopper's fp8 units. Returns the number of elements that
    differ, and the largest error as a share of the largest one that the units can make (float32 results)."""
    different, largest = 0, 0.0
    for group, part, _ in chosen.found.ranges():
        count = min(SAMPLE, part.stop - part.start)
        rows = torch.linspace(part.start, part.stop - 1, count, device=DEVICE).long()
        (weight, factors), own = chosen.weight_of(group), chosen.factors_of(group, rows)
        sums = sums_of_products(chosen.rows.values[rows], weight)
        different += int((ours[rows] != (sums * own * factors).to(ours.dtype)).sum())
        limits = largest_possible_errors(chosen.rows.values[rows], weight) * (own * factors)
        limits += chosen.exact[rows].abs() * 2.0 ** (-7 if ours.dtype is torch.bfloat16 else -22)
        largest = max(largest, float(((ours[rows] - chosen.exact[rows]).abs() / limits).max()))
    return different, largest


def errors_beside_cublas(chosen: Operands, ours: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the errors of our rows and of cuBLAS's with sums of few bits, of the experts with many rows.

    cuBLAS multiplies no fp8 matrices whose factor has an address that does not divide by 16, hence the copies.
    """
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for group, part, _ in chosen.found.ranges():
        if part.stop - part.start < MANY_ROWS:
            continue
        (weight, factor), exact = chosen.weight_of(group), chosen.exact[part]
        factors = chosen.rows.factors[group].clone(), factor.clone()
        theirs = scaled_mm(chosen.rows.values[part], weight.t(), *factors, out_dtype=ours.dtype, use_fast_accum=True)
        for errors, product in zip(found, (ours[part], theirs), strict=True):
            errors.append(errors_of_rows(product, exact))
    return torch.cat(found[0]), torch.cat(found[1])
