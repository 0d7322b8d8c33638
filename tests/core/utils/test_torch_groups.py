"""Groups that only their members make, and what a heartbeat sees while groups are made."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks

from megatron.core.utils.activity import activity
from megatron.core.utils.torch_groups import create_group, create_group_among_members
from megatron.training.hooks.exit import agreement_group


def what_torch_sees() -> tuple[Any, Any]:
    world, seen = dist.group.WORLD, []
    assert world is not None
    world.bound_device_id = torch.device("cuda", 0)  # as init_process_group(device_id=...) leaves it on a GPU
    torchs_own = dist.new_group

    def watched(*arguments: Any, **more: Any) -> Any:
        seen.append(world.bound_device_id)
        return torchs_own(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", watched)
        group = create_group_among_members([0, 2] if dist.get_rank() != 1 else [1])
    bound = world.bound_device_id
    world.bound_device_id = None
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return (seen, bound), total.item()


def test_a_group_is_not_split_off_the_world() -> None:
    """torch would wait for ranks that are no members: four GPUs stood still when a pipeline made its channels."""
    for rank, (bound, members) in enumerate(run_on_ranks(what_torch_sees, 3)):
        assert bound == ([None], torch.device("cuda", 0))
        assert members == (1 if rank == 1 else 2)


def waits_while_groups_are_made() -> list[list[tuple[str, int, tuple[int, ...]]]]:
    """Returns the calls that this rank waits for as it is in `new_group`, for one group after the other."""
    seen = []
    torchs_own = dist.new_group

    def watched(*arguments: Any, **more: Any) -> Any:
        seen.append([(call.operation, call.number, call.channel.ranks) for call in activity.waits.values()])
        return torchs_own(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", watched)
        create_group([1, 0], backend="gloo")
        create_group_among_members([0, 1] if dist.get_rank() < 2 else [2])
        agreement_group()
    assert not activity.waits
    return seen


def test_members_wait_for_each_other_while_a_group_is_made() -> None:
    """Otherwise no heartbeat finds a rank that hangs while the others make a group."""
    all_ranks = ("new_group", 1, (0, 1, 2))
    _, member, other = run_on_ranks(waits_while_groups_are_made, 3)
    assert member == [[("new_group", 1, (0, 1))], [("new_group", 2, (0, 1))], [all_ranks]]
    assert other == [[], [("new_group", 1, (2,))], [all_ranks]]
