"""Collections of process groups: numbers without communication, groups made on first use, a lone process."""

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks

from megatron.core.communication.collectives import all_reduce
from megatron.core.exceptions import UserError
from megatron.core.groups import process_groups_config
from megatron.core.groups.defaults import default_collection, set_default_collection
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid


def test_a_lone_process_has_groups_of_none() -> None:
    groups = default_collection()
    for name in (*ProcessGroupCollection.AXES, "embd", "pos_embd"):
        assert getattr(groups, name) is None
        assert (groups.size(name), groups.rank(name), groups.ranks(name)) == (1, 0, (0,))
    assert groups.hcp == [None]


def members_of_groups() -> dict[str, tuple[tuple[int, ...], list[int], int]]:
    grid = RankGrid(4, tensor=2, expert=2, expert_tensor=1)
    groups = ProcessGroupCollection.from_grid(grid, dist.get_rank())
    assert not groups._made
    seen = {}
    for name in ("tp", "dp", "dp_cp", "mp", "ep", "expt_dp", "tp_dp_cp", "embd", "intra_dp_cp"):
        group = getattr(groups, name)
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=group)
        seen[name] = groups.ranks(name), dist.get_process_group_ranks(group), int(total)
    assert groups.dp is groups.dp_cp is groups.intra_dp_cp  # one communicator for one set of ranks
    assert groups.tp_dp_cp is dist.group.WORLD
    groups.close()
    return seen


def test_groups_are_made_on_first_use_and_shared() -> None:
    for rank, seen in enumerate(run_on_ranks(members_of_groups, 4)):
        assert seen["tp"][0] == ((0, 1) if rank < 2 else (2, 3))
        assert seen["dp"][0] == ((0, 2) if rank % 2 == 0 else (1, 3))
        assert seen["expt_dp"][0] == seen["dp"][0]
        for ranks, made, total in seen.values():
            assert list(ranks) == made
            assert total == sum(ranks)


def with_and_without_the_embedding() -> list[float]:
    """Pipelines of three, in which the ranks in the middle are not in `embd`; then other groups; all twice."""
    sums = []
    for _ in range(2):
        groups = ProcessGroupCollection.from_grid(RankGrid(6, pipeline=3), dist.get_rank())
        for name in ("embd", "dp", "pp"):
            if groups.rank(name) >= 0:
                sums.append(float(all_reduce(torch.tensor([float(dist.get_rank())]), getattr(groups, name))))
        groups.close()
    return sums


def test_members_of_different_numbers_of_groups_make_one_together() -> None:
    pipelines, data = {0: 6.0, 1: 9.0}, {0: 1.0, 1: 5.0, 2: 9.0}
    for rank, sums in enumerate(run_on_ranks(with_and_without_the_embedding, 6)):
        number, stage = rank % 2, rank // 2
        embedding = [] if stage == 1 else [(number, number + 4)]
        assert sums == [*(float(sum(e)) for e in embedding), data[stage], pipelines[number]] * 2


def hand_filled() -> tuple[int, int, tuple[int, ...]]:
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
    groups.tp = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups.freeze()
    with pytest.raises(UserError, match="frozen"):
        groups.dp = dist.group.WORLD
    with pytest.raises(UserError, match="filled by hand without `pp`"):
        groups.size("pp")
    with pytest.raises(UserError, match=r"initialize_model_parallel\(\) first, or pass pg_collection"):
        default_collection()
    return groups.size("dp_cp"), groups.size("tp"), groups.ranks("dp_cp")


def test_a_collection_filled_by_hand() -> None:
    assert run_on_ranks(hand_filled, 2) == [(2, 1, (0, 1))] * 2
    with pytest.raises(UserError, match="has no group `xy`"):
        ProcessGroupCollection(xy=None)


def test_the_default_can_be_set_and_cleared() -> None:
    groups = ProcessGroupCollection.from_grid(RankGrid(8, tensor=2, pipeline=2), rank=5)
    set_default_collection(groups)
    try:
        assert default_collection() is groups
        assert (groups.ranks("tp"), groups.ranks("pp"), groups.ranks("embd")) == ((4, 5), (1, 5), (1, 5))
        assert groups.ranks("pos_embd") == (1,)
        assert groups.rank("pos_embd") == -1
    finally:
        set_default_collection(None)
    assert default_collection() is not groups


def options_of_groups() -> dict[str, object]:
    """Returns what torch is asked for, in a world that says it has NCCL too."""
    settings = {"dp": {"max_ctas": 8}, "tp_dp": {"min_ctas": 2}, "pp": {"is_high_priority_stream": True}}
    groups = ProcessGroupCollection.from_grid(
        RankGrid(4, tensor=2, pipeline=2), dist.get_rank(), nccl_settings=settings
    )
    asked: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda *group: "cpu:gloo,cuda:nccl")
        patch.setattr(process_groups_config, "get_nccl_options", lambda name, table: (name, table[name]))
        patch.setattr(
            process_groups_config, "create_group_among_members", lambda ranks, timeout, options: asked.append(options)
        )
        _ = groups.pp, groups.tp, groups.tp_dp_cp
        groups.channel(*groups.ranks("pp"))
        everyone = ProcessGroupCollection.from_grid(RankGrid(4), dist.get_rank(), nccl_settings=settings)
        _ = everyone.dp  # has settings, so it is not the world's group
    plain = ProcessGroupCollection.from_grid(RankGrid(4), dist.get_rank(), nccl_settings=settings)
    assert plain.dp is dist.group.WORLD  # gloo has no settings
    return {"asked": asked}


def test_groups_of_nccl_have_the_settings_of_the_file() -> None:
    """--nccl-communicator-config-path"""
    high = ("pp", {"is_high_priority_stream": True})
    for seen in run_on_ranks(options_of_groups, 4):
        assert seen["asked"] == [high, ("tp_dp", {"min_ctas": 2}), high, ("dp", {"max_ctas": 8})]


def test_groups_of_the_same_ranks_say_whose_settings_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(process_groups_config, "warn_on_first_rank", said.append)
    monkeypatch.setattr(process_groups_config, "get_nccl_options", lambda name, table: table[name])
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    settings = {"tp": {"max_ctas": 1}, "dp_cp": {"max_ctas": 8}, "dp": {"max_ctas": 4}, "intra_dp_cp": {"max_ctas": 8}}
    groups = ProcessGroupCollection.from_grid(RankGrid(4, tensor=2), 0, nccl_settings=settings)
    assert groups._nccl_options(groups.ranks("dp")) == {"max_ctas": 8}
    (sentence,) = said
    assert ": dp and dp_cp have the same ranks in this layout" in sentence and sentence.endswith("settings of dp_cp")
    assert groups._nccl_options(groups.ranks("tp")) == {"max_ctas": 1} and len(said) == 1
