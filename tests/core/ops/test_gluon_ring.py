"""Rings of stages in kernels in Gluon: the order of tiles. The kernels that use the rings are compiled by
tests/core/ops/test_compiled_kernels.py, and run on a GPU."""

from types import SimpleNamespace

import pytest

from megatron.core.ops import gluon_ring


@pytest.mark.parametrize(("down", "across"), [(1, 1), (3, 5), (8, 2), (19, 4), (16, 1)])
def test_bands_have_every_tile_once_and_neighbours_share_a_column(
    down: int, across: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_ring, "gl", SimpleNamespace(minimum=min))
    monkeypatch.setattr(gluon_ring, "BAND", 8)
    places = [gluon_ring.place_in_band.fn(tile, down, across) for tile in range(down * across)]
    assert sorted(places) == [(row, column) for row in range(down) for column in range(across)]
    assert places[: min(8, down)] == [(row, 0) for row in range(min(8, down))]
    assert [row // 8 for row, _ in places] == sorted(row // 8 for row, _ in places)
