"""Groups as plain integers, against direct enumeration of Megatron-LM's formulas."""

import itertools

import pytest

from megatron.core.exceptions import UserError
from megatron.core.groups.rank_grid import DEFAULT_ORDER, GROUP_AXES, RankGrid, hierarchical_groups, ranks_text


def megatron_lm_dense(tp: int, cp: int, dp: int, pp: int) -> dict[int, dict[str, int]]:
    """rank = tp + TP * (cp + CP * (dp + DP * pp))."""
    axes = itertools.product(range(tp), range(cp), range(dp), range(pp))
    return {t + tp * (c + cp * (d + dp * p)): {"tp": t, "cp": c, "dp": d, "pp": p} for t, c, d, p in axes}


def megatron_lm_expert(etp: int, ep: int, edp: int, pp: int) -> dict[int, dict[str, int]]:
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
def test_groups_are_megatron_lms(tp: int, cp: int, dp: int, pp: int, ep: int, etp: int) -> None:
    world = tp * cp * dp * pp
    grid = RankGrid(world, tensor=tp, context=cp, pipeline=pp, expert=ep, expert_tensor=etp)
    dense = megatron_lm_dense(tp, cp, dp, pp)
    expert = megatron_lm_expert(etp, ep, world // (etp * ep * pp), pp)
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
    with pytest.raises(UserError, match=r"expert tensor x expert \(1 x 4\) divides tensor x context \(2 x 1\)"):
        RankGrid(16, tensor=2, pipeline=2, expert=4, expert_tensor=1, order="tp-cp-ep-pp-dp")
    RankGrid(16, tensor=2, pipeline=2, expert=2, expert_tensor=1, order="tp-cp-ep-pp-dp")


def test_the_other_mapping_without_experts_takes_any_context_size() -> None:
    """Data parallel ranks then lie on both sides of the pipeline: TP 2 x CP 2 | PP 2 | DP 2."""
    grid = RankGrid(16, tensor=2, context=2, pipeline=2, order="tp-cp-ep-pp-dp")
    assert grid.group(0, ["pp"]) == (0, 4) == grid.experts.group(0, ["pp"])
    assert grid.named_group("expt_dp", 1) == (1, 3, 9, 11) == grid.named_group("dp_cp", 1)
    assert [grid.coordinates(rank)["edp"] for rank in (1, 3, 9, 11)] == [0, 1, 2, 3]
    assert grid.axis_size("edp") == 4 and grid.named_groups("expt_dp") == grid.named_groups("dp_cp")


def test_sizes_that_do_not_fit_are_named_with_those_that_would() -> None:
    with pytest.raises(
        UserError, match=r"4 x 1 x 2 = 8 does not divide the 12 ranks; start 8 or 16 ranks, or use .* one of 6, 12"
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
    for name in GROUP_AXES:
        groups = grid.named_groups(name)
        assert len(groups) * len(groups[0]) == 16_384


@pytest.mark.parametrize("order", [DEFAULT_ORDER, "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("instances", [1, 2, 4])
def test_groups_by_name_are_partitions_and_those_of_each_rank(order: str, instances: int) -> None:
    grid = RankGrid(64, tensor=2, context=2, pipeline=4, order=order, optimizer_instances=instances)
    for name in GROUP_AXES:
        groups = grid.named_groups(name)
        assert sorted(itertools.chain(*groups)) == list(range(64)), name
        for group in groups:
            assert list(group) == sorted(group)
            assert all(grid.named_group(name, rank) == group for rank in group), name


def test_instances_of_the_optimizers_state() -> None:
    """TP 2 x CP 2 x DP 4: an instance takes two neighbouring replicas, both halves of their sequences."""
    grid = RankGrid(16, tensor=2, context=2, optimizer_instances=2)
    assert grid.named_group("dp_cp", 0) == (0, 2, 4, 6, 8, 10, 12, 14)
    assert grid.named_group("intra_dp_cp", 10) == grid.named_group("intra_expt_dp", 10) == (8, 10, 12, 14)
    assert grid.named_group("inter_dist_opt", 10) == (2, 10)
    assert grid.named_groups("intra_dist_opt") == [tuple(range(8)), tuple(range(8, 16))]
    with pytest.raises(
        UserError, match=r"3 instances .* do not divide the 8 data and context parallel ranks; use 2 or 4"
    ):
        RankGrid(16, tensor=2, context=2, optimizer_instances=3)
    with pytest.raises(UserError, match=r"4 instances .* do not divide the 2 data parallel ranks of an expert; use 2"):
        RankGrid(16, tensor=2, expert=8, expert_tensor=1, optimizer_instances=4)


def test_ranks_in_words() -> None:
    assert (
        ranks_text((4,)) == "4"
        and ranks_text((0, 1, 2, 3)) == "0 to 3"
        and ranks_text((1, 9, 17, 25)) == "1 to 25 by 8"
    )
    assert ranks_text((0, 1, 4, 5)) == "0, 1, 4, 5"
