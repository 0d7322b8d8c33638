"""The kernels of grouped products in fp8, in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
from support import fp8_grouped_kernels, fp8_tiles

from megatron.core.ops.fp8 import grouped_product_triton
from megatron.core.ops.fp8.grouped_product_triton import TILES, Tile


@pytest.mark.parametrize("check", ["products", "weight_gradients"])
def test_the_kernel_agrees_with_its_definition(check: str) -> None:
    getattr(fp8_grouped_kernels, check)()


@pytest.mark.fast("precise-tile2", "weight-tile4", "blocks-tile3", "weight_parts-tile5")
@pytest.mark.parametrize(("kind", "tile"), fp8_tiles.TILES_OF_KINDS)
def test_each_tile_of_the_table_agrees(kind: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Persistent programs: with fewer and with more programs than tiles."""
    for programs in (2, 1000) if tile.persistent else (2,):
        monkeypatch.setattr(grouped_product_triton, "num_multiprocessors", lambda device, found=programs: found)
        fp8_tiles.tile_of(kind, tile, fp8_tiles.SMALL)


def test_tiles_are_chosen_by_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, int, int, bool]] = []

    class Noted:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return self.launch

        def launch(self, *args: object, **settings: Any) -> None:
            width = settings["WIDTH" if "WIDTH" in settings else "IN"]
            launched.append((width, settings["num_stages"], settings["num_warps"], settings["FLATTEN"]))

    for kernel in ("_product_kernel", "_weight_kernel"):
        monkeypatch.setattr(grouped_product_triton, kernel, Noted())
    fp8_tiles.one_of_each_kind()
    expected = [getattr(TILES, kind) for kind in (*fp8_tiles.KINDS, "weight_parts")]
    assert launched == [(tile.width, tile.stages, tile.warps, tile.persistent) for tile in expected]
