"""Groups that only their members make."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks

from megatron.core.utils.torch_groups import create_group_among_members


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
