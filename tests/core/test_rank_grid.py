"""Groups as pure integers: against direct enumeration of the published formulas."""

import itertools

import pytest

from megatron.core.exceptions import UserError
from megatron.core.rank_grid import RankGrid, hierarchical_groups


def published_dense(tp: int, cp: int, dp: int, pp: int) -> dict[int, dict[str, int]]:
    """rank = tp + TP * (cp + CP * (dp + DP * pp))."""
    axes = itertools.product(range(tp), range(cp), range(dp), range(pp))
    return {t + tp * (c + cp * (d + dp * p)): {"tp": t, "cp": c, "dp": d, "pp": p} for t, c, d, p in axes}


def published_expert(etp: int, ep: int, edp: int, pp: int) -> dict[int, dict[str, int]]:
    axes = itertools.product(range(etp), range(ep), range(edp), range(pp))
    return {t + etp * (e + ep * (d + edp * p)): {"etp": t, "ep": e, "edp": d, "pp": p} for t, e, d, p in axes}


def enumerated(places: dict[int, dict[str, int]], along: tuple[str, ...]) -> list[tuple[int, ...]]:
    by_rest: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in sorted(places):
        by_rest.setdefault(tuple(item for item in places[rank].items() if item[0] not in along), []).append(rank)
    return sorted(tuple(ranks) for ranks in by_rest.values())


@pytest.mark.parametrize(
    ("tp", "cp", "dp", "pp", "ep", "etp"), [(2, 2, 4, 3, 4, 2), (4, 1, 2, 2, 8, 1), (1, 3, 4, 1, 2, 3)]
)
def test_groups_are_the_published_ones(tp: int, cp: int, dp: int, pp: int, ep: int, etp: int) -> None:
    world = tp * cp * dp * pp
    grid = RankGrid(world, tensor=tp, context=cp, pipeline=pp, expert=ep, expert_tensor=etp)
    dense = published_dense(tp, cp, dp, pp)
    expert = published_expert(etp, ep, world // (etp * ep * pp), pp)
    for places in (dense, expert):
        names = tuple(next(iter(places.values())))
        for count in range(5):
            for along in itertools.combinations(names, count):
                groups = grid.groups(along)
                assert sorted(groups) == enumerated(places, along)
                assert sorted(itertools.chain(*groups)) == list(range(world))
                assert all(grid.group(rank, along) == group for group in groups for rank in group)
    assert all(grid.coordinates(rank) == dense[rank] | expert[rank] for rank in range(world))


def test_the_other_mapping_has_data_parallel_ranks_outermost() -> None:
    grid = RankGrid(16, tensor=2, pipeline=4, order="tp-cp-ep-pp-dp")
    assert grid.group(0, ["pp"]) == (0, 2, 4, 6)
    assert grid.group(0, ["dp"]) == (0, 8)
    assert grid.groups(["tp", "pp"]) == [tuple(range(8)), tuple(range(8, 16))]


def test_pipelines_of_the_two_grids_must_agree() -> None:
    with pytest.raises(UserError, match=r"expert tensor x expert \(1 x 4\) equals tensor x context \(2 x 1\)"):
        RankGrid(16, tensor=2, pipeline=2, expert=4, expert_tensor=1, order="tp-cp-ep-pp-dp")
    RankGrid(16, tensor=2, pipeline=2, expert=2, expert_tensor=1, order="tp-cp-ep-pp-dp")


def test_sizes_that_do_not_fit_are_named_with_those_that_would() -> None:
    with pytest.raises(
        UserError, match=r"4 x 1 x 2 = 8 does not divide the 12 ranks; .* 8 or 16 ranks .* one of 6, 12"
    ):
        RankGrid(12, tensor=4, pipeline=2)
    with pytest.raises(
        UserError, match=r"expert tensor x expert x pipeline = 1 x 8 x 1 = 8 does not divide the 4 ranks"
    ):
        RankGrid(4, expert=8)
    with pytest.raises(UserError, match="context parallel size is 0"):
        RankGrid(4, context=0)
    with pytest.raises(UserError, match="order 'tp-xx' must name"):
        RankGrid(4, order="tp-xx")
    with pytest.raises(UserError, match="leaves out pp"):
        RankGrid(4, pipeline=2, order="tp-dp")


def test_hierarchical_context_groups_join_neighbours_first() -> None:
    levels = hierarchical_groups([10, 11, 12, 13, 14, 15, 16, 17], [2, 4])
    assert levels == [[(10, 11), (12, 13), (14, 15), (16, 17)], [(10, 12, 14, 16), (11, 13, 15, 17)]]
    with pytest.raises(UserError, match="2 x 3 = 6 must multiply to the context parallel size 8"):
        hierarchical_groups(range(8), [2, 3])


def test_sixteen_thousand_ranks() -> None:
    grid = RankGrid(16_384, tensor=8, context=2, pipeline=16, expert=8)
    for along in (["tp"], ["cp"], ["dp"], ["pp"], ["tp", "pp"], ["dp", "cp"], ["ep"], ["etp", "ep", "pp"], ["edp"]):
        groups = grid.groups(along)
        assert len(groups) * len(groups[0]) == 16_384
