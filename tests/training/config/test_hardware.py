"""Impossible numbers of GPUs, and flags that need others."""

import pytest
from support.command_lines import configured, problems_of, problems_of_config

from megatron.training.config.hardware import HardwareConfig


@pytest.mark.parametrize("field", ["gpus_per_node", "gpus_per_nvlink_domain"])
def test_a_node_has_gpus(field: str) -> None:
    flag = "--" + field.replace("_", "-")
    assert problems_of_config(HardwareConfig, **{field: 0}) == [f"{flag} 0 must be at least 1"]
    assert problems_of(f"{flag} 0") == [f"{flag} 0 must be at least 1"]


def test_a_gpu_is_for_dry_runs() -> None:
    notes = configured("--gpu h100").notes
    assert any(note == "--gpu h100: has no effect without --dry-run" for note in notes), notes
    assert configured("--gpu h100 --dry-run").hardware.gpu == "h100"
    assert not any("--plot" in note for note in configured("--plot folder --dry-run").notes)  # it draws the memory
