"""Which rank of a legacy checkpoint is which, and where its file is."""

from pathlib import Path

import pytest

from megatron.conversion.megatron_lm.legacy_layout import FILE, ModelLayout, paths_by_place
from megatron.core.exceptions import UserError


def test_each_place_of_a_layout_is_a_rank_of_its_own() -> None:
    layout = ModelLayout(tensor=2, pipeline=3, expert=2)
    places = [(t, p, e) for p in range(3) for e in range(2) for t in range(2)]
    assert [layout.rank(*place) for place in places] == list(range(layout.world_size)) == list(range(12))


def test_folders_are_found_by_their_numbers(tmp_path: Path) -> None:
    for name in ("mp_rank_00", "mp_rank_01_002", "mp_rank_10_000_003", "mp_rank_1", "rank_00"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).touch()
    (tmp_path / "mp_rank_07").mkdir()  # without a file
    found = paths_by_place(tmp_path)
    assert {place: path.name for place, path in found.items()} == {
        (0,): "mp_rank_00",
        (1, 2): "mp_rank_01_002",
        (10, 0, 3): "mp_rank_10_000_003",
    }


def test_a_folder_without_ranks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no mp_rank_NN/model_optim_rng\.pt"):
        paths_by_place(tmp_path)
