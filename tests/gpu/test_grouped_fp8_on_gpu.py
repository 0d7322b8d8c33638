"""fp8 in experts on a GPU: kernels against their definitions, a layer against the emulation, no step that waits."""

import dataclasses
import itertools

import pytest
import torch
from support import fp8_grouped_kernels, fp8_tiles
from torch import Tensor, nn

from megatron.core import backends
from megatron.core.backends import LOCAL, Backend
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.grouped_linear import Fp8GroupedLinear
from megatron.core.ops.fp8.grouped_product_triton import Tile
from megatron.core.ops.fp8.micro_batches import MicroBatches
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit
from megatron.core.ops.moe.grouped_linear import RowGroups

pytestmark = pytest.mark.gpu

RECIPES = ("tensorwise", "delayed", "blockwise")


@pytest.fixture
def kernels() -> Backend:
    backend = backends.triton_backend()
    assert backend is not None
    return backend


@pytest.mark.parametrize("check", ["largest_values", "casts", "by_largest", "blocks", "products", "weight_gradients"])
def test_kernels_agree_with_their_definitions(check: str) -> None:
    getattr(fp8_grouped_kernels, check)()


@pytest.mark.parametrize(("kind", "tile"), fp8_tiles.TILES_OF_KINDS)
def test_each_tile_of_the_table_agrees_at_the_sizes_of_a_large_model(kind: str, tile: Tile) -> None:
    for sizes in (fp8_tiles.MOE64, fp8_tiles.MOE64_SECOND):
        fp8_tiles.tile_of(kind, tile, sizes)


@pytest.mark.parametrize("sizes", [fp8_tiles.SMALL, fp8_tiles.MOE64, fp8_tiles.MOE64_SECOND])
def test_blocks_by_specialised_warps_agree(sizes: fp8_tiles.Sizes) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper GPUs")
    fp8_tiles.specialized_blocks(sizes)


def few_bits(kind: str, tile: Tile, sizes: str, scope: str, transposed: bool) -> tuple[fp8_tiles.Operands, Tensor]:
    """Returns operands and what a tile computes with sums of few bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the units of Hopper; others add otherwise")
    chosen = fp8_tiles.operands(getattr(fp8_tiles, sizes), scope, transposed)
    dtype = torch.float32 if kind == "fast_float32" else torch.bfloat16
    return chosen, chosen.product(tile, dtype, precise=False)


@pytest.mark.parametrize(("kind", "tile"), fp8_tiles.FAST_TILES)
@pytest.mark.parametrize("sizes", ["MOE64", "SQUARES"])
def test_sums_of_few_bits_are_those_of_the_hardware(kind: str, tile: Tile, sizes: str) -> None:
    """They equal the model of the units bit for bit. A row with a sum of squares may be wrong by 2.5%: all its
    truncations have the same direction."""
    found = {}
    for case in itertools.product(("segments",), (False, True)):
        found[case] = fp8_tiles.differs_from_hopper(*few_bits(kind, tile, sizes, *case))
    assert all(share <= 1.0 for _, share in found.values()), found
    assert not any(different for different, _ in found.values()), found


@pytest.mark.parametrize(("kind", "tile"), fp8_tiles.FAST_TILES)
@pytest.mark.parametrize("sizes", ["MOE64", "SQUARES"])
def test_sums_of_few_bits_are_as_near_to_float64_as_those_of_cublas(kind: str, tile: Tile, sizes: str) -> None:
    for transposed in (False, True):
        ours, theirs = fp8_tiles.errors_beside_cublas(*few_bits(kind, tile, sizes, "segments", transposed))
        for value in (Tensor.max, Tensor.mean):
            assert float(value(ours)) <= 1.1 * float(value(theirs)), (
                transposed,
                float(value(ours)),
                float(value(theirs)),
            )


def counts(sizes: tuple[tuple[int, int], ...]) -> RowGroups:
    return RowGroups.of_sources(torch.tensor(sizes, device="cuda").t())


def operands(rows: int) -> tuple[Tensor, nn.Parameter, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x, w, dy = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in ((rows, 512), (3, 768, 512), (rows, 768))
    )
    return x.requires_grad_(), nn.Parameter(w), dy


def layer_of(backend: Backend, recipe: str, name: str, weight: Tensor) -> Fp8GroupedLinear:
    settings = Fp8Settings(recipe, FORMATS[name], kernels=backend.fp8_kernels)
    return Fp8GroupedLinear(settings, LinearSplit(), weight, MicroBatches((0, 1)))


def gradients(backend: Backend, recipe: str, name: str) -> list[Tensor]:
    x, w, dy = operands(777)
    layer, groups = layer_of(backend, recipe, name, w), counts(((300, 77), (0, 0), (1, 399)))
    for _ in range(2):  # the second is warm, for delayed scaling
        x.grad = w.grad = None
        output = layer(x, w, groups)
        output.backward(dy)
        if recipe == "delayed":
            layer.scaling.add_step(layer.scaling.take_seen())
    assert x.grad is not None and w.grad is not None
    return [output.detach(), x.grad, w.grad]


@pytest.mark.parametrize(("recipe", "name"), itertools.product(RECIPES, FORMATS))
def test_a_layer_equals_the_emulated_one(kernels: Backend, recipe: str, name: str) -> None:
    found, expected = (gradients(backend, recipe, name) for backend in (kernels, LOCAL))
    for ours, exact in zip(found, expected, strict=True):
        error = (ours.double() - exact.double()).norm() / exact.double().norm()
        assert error < 0.005, (recipe, name, float(error))  # sums of fewer bits, rounded to bfloat16


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_does_not_wait_for_the_host(kernels: Backend, recipe: str) -> None:
    x, w, dy = operands(512)
    groups = dataclasses.replace(counts(((100, 28), (0, 0), (1, 383))))
    layer = layer_of(kernels, recipe, "hybrid", w)
    layer(x, w, groups).backward(dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, w, groups).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
