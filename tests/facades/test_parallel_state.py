"""Megatron-LM's functions for process groups: names, values, real processes, and initializing a second time."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks
from support.programs import python

from megatron.core.communication.collectives import group_ranks
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import default_collection, set_default_collection
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.facades import parallel_state


@pytest.fixture
def clean() -> Any:
    parallel_state.destroy_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("clean")
def test_a_lone_process_needs_no_torch_distributed() -> None:
    assert parallel_state.is_unitialized()
    with pytest.raises(UserError, match=r"initialize_model_parallel\(\) first"):
        parallel_state.get_tensor_model_parallel_rank()
    assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None
    parallel_state.initialize_model_parallel()
    assert parallel_state.is_initialized()
    assert parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1
    assert parallel_state.get_all_ranks() == "0_0_0_0_0"
    assert parallel_state.is_pipeline_first_stage() and parallel_state.is_pipeline_last_stage()
    with pytest.raises(UserError, match="exist already"):
        parallel_state.initialize_model_parallel()


@pytest.mark.usefixtures("clean")
def test_setters_override_and_virtual_stages_count() -> None:
    parallel_state.initialize_model_parallel()
    parallel_state.set_tensor_model_parallel_world_size(4)
    parallel_state.set_tensor_model_parallel_rank(3)
    parallel_state.set_pipeline_model_parallel_world_size(2)
    parallel_state.set_pipeline_model_parallel_rank(1)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
    assert parallel_state.get_tensor_model_parallel_world_size() == 4
    assert parallel_state.get_tensor_model_parallel_rank() == 3
    assert parallel_state.is_pipeline_last_stage() and not parallel_state.is_pipeline_first_stage()
    assert not parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=0)
    assert parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=1)
    assert not parallel_state.is_pipeline_v_shaped()


@pytest.mark.usefixtures("clean")
def test_every_getter_under_a_layout() -> None:
    """Rank 21 of 32 = TP 2 x CP 2 x DP 4 x PP 2: tp 1, cp 0, dp 1, pp 1; of experts: etp 0, ep 1, edp 2, pp 1."""
    grid = RankGrid(32, tensor=2, context=2, pipeline=2, expert=2, expert_tensor=1, optimizer_instances=2)
    set_default_collection(ProcessGroupCollection.from_grid(grid, 21, hierarchical_context_sizes=[2, 1]))
    for name, wanted in GETTERS.items():
        function, _, flag = name.partition("?")
        value = getattr(parallel_state, f"get_{function}")(**({flag: True} if flag else {}))
        assert value == wanted, name
    for name, ranks in GROUPS.items():
        function, *flags = name.split("?")
        assert group_ranks(getattr(parallel_state, f"get_{function}")(**dict.fromkeys(flags, True))) == ranks, name
    levels = parallel_state.get_hierarchical_context_parallel_groups()
    assert [group_ranks(group) for group in levels[:1]] == [(21, 23)] and levels[1] is None
    assert parallel_state.is_pipeline_last_stage() and parallel_state.is_rank_in_embedding_group()
    assert not parallel_state.is_rank_in_position_embedding_group()
    with pytest.raises(UserError, match="goes with with_context_parallel=True"):
        parallel_state.get_data_parallel_world_size(partial_data_parallel=True)


GETTERS = {
    "tensor_model_parallel_world_size": 2,
    "tensor_model_parallel_rank": 1,
    "tensor_model_parallel_src_rank": 20,
    "pipeline_model_parallel_world_size": 2,
    "pipeline_model_parallel_rank": 1,
    "pipeline_model_parallel_first_rank": 5,
    "pipeline_model_parallel_last_rank": 21,
    "pipeline_model_parallel_next_rank": 5,
    "pipeline_model_parallel_prev_rank": 5,
    "model_parallel_src_rank": 4,
    "context_parallel_world_size": 2,
    "context_parallel_rank": 0,
    "context_parallel_global_ranks": [21, 23],
    "tensor_and_context_parallel_world_size": 4,
    "tensor_and_context_parallel_rank": 1,
    "data_parallel_world_size": 4,
    "data_parallel_rank": 1,
    "data_parallel_src_rank": 17,
    "data_parallel_world_size?with_context_parallel": 8,
    "data_parallel_rank?with_context_parallel": 2,
    "expert_model_parallel_world_size": 2,
    "expert_model_parallel_rank": 1,
    "expert_model_parallel_src_rank": 20,
    "expert_tensor_parallel_world_size": 1,
    "expert_tensor_parallel_rank": 0,
    "expert_tensor_and_model_parallel_world_size": 2,
    "expert_tensor_and_model_parallel_rank": 1,
    "expert_data_parallel_world_size": 8,
    "expert_data_parallel_rank": 2,
    "expert_data_parallel_world_size?partial_expert_data_parallel": 4,
    "expert_data_parallel_rank?partial_expert_data_parallel": 2,
    "all_ranks": "1_1_0_1_1",
}
GROUPS = {
    "tensor_model_parallel_group": (20, 21),
    "pipeline_model_parallel_group": (5, 21),
    "model_parallel_group": (4, 5, 20, 21),
    "embedding_group": (5, 21),
    "context_parallel_group": (21, 23),
    "tensor_and_context_parallel_group": (20, 21, 22, 23),
    "data_parallel_group": (17, 21, 25, 29),
    "data_parallel_group?with_context_parallel": (17, 19, 21, 23, 25, 27, 29, 31),
    "data_parallel_group?with_context_parallel?partial_data_parallel": (17, 19, 21, 23),
    "inter_distributed_optimizer_instance_group": (21, 29),
    "intra_distributed_optimizer_instance_group": (*range(8), *range(16, 24)),
    "tensor_and_data_parallel_group": (16, 17, 20, 21, 24, 25, 28, 29),
    "tensor_and_data_parallel_group?with_context_parallel": tuple(range(16, 32)),
    "amax_reduction_group?tp_only_amax_red?with_context_parallel": (20, 21, 22, 23),
    "expert_model_parallel_group": (20, 21),
    "expert_tensor_and_model_parallel_group": (20, 21),
    "expert_tensor_model_pipeline_parallel_group": (4, 5, 20, 21),
    "expert_data_parallel_group": tuple(range(17, 32, 2)),
    "expert_data_parallel_group?partial_expert_data_parallel": (17, 19, 21, 23),
}


def values_on_four_ranks() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for sizes in ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, {"context_parallel_size": 4}):
        parallel_state.initialize_model_parallel(**sizes)  # type: ignore[arg-type]
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=parallel_state.get_model_parallel_group())
        data = torch.ones(1)
        dist.all_reduce(data, group=parallel_state.get_data_parallel_group_gloo(with_context_parallel=True))
        seen[next(iter(sizes))] = {
            "ranks": parallel_state.get_all_ranks(),
            "model": int(total),
            "data": int(data),
            "next": parallel_state.get_pipeline_model_parallel_next_rank(),
            "first": parallel_state.get_tensor_model_parallel_src_rank(),
            "embedding": parallel_state.is_rank_in_embedding_group(),
            "position": parallel_state.is_rank_in_position_embedding_group(),
            "context": parallel_state.get_context_parallel_global_ranks(),
            "default": default_collection().size("tp"),
        }
        parallel_state.destroy_model_parallel()
    return seen


def test_values_in_a_world_of_four_and_twice_in_one_process() -> None:
    for rank, seen in enumerate(run_on_ranks(values_on_four_ranks, 4)):
        cut, whole = seen["tensor_model_parallel_size"], seen["context_parallel_size"]
        assert cut == {
            "ranks": f"{rank % 2}_0_0_{rank // 2}_0",
            "model": 6,
            "data": 1,
            "next": (rank + 2) % 4,
            "first": rank // 2 * 2,
            "embedding": True,
            "position": rank < 2,
            "context": [rank],
            "default": 2,
        }
        assert whole["ranks"] == f"0_0_{rank}_0_0"
        assert (whole["data"], whole["model"], whole["context"]) == (4, rank, [0, 1, 2, 3])


def hierarchical() -> list[tuple[int, ...]]:
    parallel_state.initialize_model_parallel(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2])
    groups = parallel_state.get_hierarchical_context_parallel_groups()
    members = [tuple(dist.get_process_group_ranks(group)) for group in groups if group is not None]
    by_hand, _ = parallel_state.create_hierarchical_groups(dist.get_rank(), range(4), [2, 2])
    assert [tuple(dist.get_process_group_ranks(group)) for group in by_hand] == members
    hybrid = parallel_state.create_hybrid_dp_cp_groups(dist.get_rank(), range(4))
    assert {size: group.size() for size, group in hybrid.items()} == {2: 2}
    parallel_state.destroy_model_parallel()
    return members


def test_hierarchical_context_groups() -> None:
    assert run_on_ranks(hierarchical, 4) == [[(0, 1), (0, 2)], [(0, 1), (1, 3)], [(2, 3), (0, 2)], [(2, 3), (1, 3)]]


def test_masked_groups_repeat_over_a_larger_world() -> None:
    groups = parallel_state.generate_masked_orthogonal_rank_groups(16, [2, 2, 2], [False, True, False])
    assert groups[:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups[4:] == [[8 + rank for rank in group] for group in groups[:4]]


SCRIPT = """
import os
from megatron.facades import parallel_state
parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
place = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
os.write(1, b"rank %d of %d\\n" % place)  # in one piece, which the other rank's cannot run into
"""


def test_torchruns_environment_is_enough(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]
