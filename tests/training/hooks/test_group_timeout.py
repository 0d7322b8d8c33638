"""--distributed-timeout-seconds-after-init: the time limit changes after the first step of the run."""

from datetime import timedelta
from typing import Any

import pytest
from support.command_lines import configured, problems_of

from megatron.core.groups import process_groups_config
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.training.hooks.group_timeout import GroupTimeout


def test_all_groups_get_the_limit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, limits = ProcessGroupCollection.from_grid(RankGrid(2, tensor=2), 0), []
    monkeypatch.setattr(process_groups_config, "set_group_timeout", lambda *given: limits.append(given))
    hook = GroupTimeout(groups, 7)
    hook.after_step(5)
    assert limits == [] and groups.__dict__["_timeout"] == timedelta(seconds=7)  # without torch.distributed
    world: Any = type("Distributed", (), {"is_initialized": lambda: True, "group": type("Group", (), {"WORLD": "w"})})
    monkeypatch.setattr(process_groups_config, "dist", world)
    groups.__dict__["_made"], groups.__dict__["_channels"] = {(0, 1): "made"}, {(0, 1): "channel"}
    hook.after_step(6)
    assert limits == []
    GroupTimeout(groups, 8).after_step(6)
    assert limits == [(timedelta(seconds=8), name) for name in ("w", "made", "channel")]


def test_the_flag() -> None:
    flag = "--distributed-timeout-seconds-after-init"
    assert configured(f"{flag} 90").parallel.distributed_timeout_seconds_after_init == 90
    assert problems_of(f"{flag} 0") == [f"{flag} 0 must be at least 1"]
