"""Parameters are found in flat buffers by their content."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron.conversion.megatron_lm.flat_buffers import find_flat_state, is_flat_state
from megatron.conversion.megatron_lm.names import Found
from megatron.conversion.megatron_lm.torch_dist import DistFolder
from megatron.core.exceptions import UserError

GROUP = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"


def folder_of(path: Path, buckets: Mapping[str, Tensor]) -> DistFolder:
    """A folder with these main weights in buckets, whose moments are ten and a hundred times as large."""
    tensors = {f"{name}.param": values for name, values in buckets.items()}
    tensors |= {f"{name}.exp_avg": values * 10 for name, values in buckets.items()}
    tensors |= {f"{name}.exp_avg_sq": values * 100 for name, values in buckets.items()}
    dcp.save(tensors, checkpoint_id=path, no_dist=True)
    return DistFolder(path)


def found_in(path: Path, buckets: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Found:
    folder, found = folder_of(path, buckets), Found()
    for name, weight in weights.items():
        found.add(name, weight.dtype, partial(weight.reshape, -1))
    find_flat_state(folder, folder.tensors, {name: weight.shape for name, weight in weights.items()}, found)
    return found


def test_any_order_and_padding(tmp_path: Path) -> None:
    torch.manual_seed(1)
    masters = {name: torch.randn(shape) for name, shape in {"a": (7,), "b": (130,), "c": (5, 13), "d": (1,)}.items()}
    weights = {name: master.bfloat16() for name, master in masters.items()}
    first = torch.cat([masters["c"].view(-1), masters["a"], torch.zeros(128 - 72), masters["d"], torch.zeros(63)])
    second = torch.cat([masters["b"], torch.zeros(62)])
    found = found_in(tmp_path, {f"{GROUP}.bucket_idx_0": first, f"{GROUP}.bucket_idx_1": second}, weights)
    for name, master in masters.items():
        for kind, factor in (("param", 1), ("exp_avg", 10), ("exp_avg_sq", 100)):
            assert found.tensors[f"optimizer.{kind}.{name}"].read().equal(master.view(-1) * factor), (name, kind)
    assert not found.notes


def test_rows_that_a_module_holds_in_another_order(tmp_path: Path) -> None:
    """A gated delta net of two key heads with 4 channels, and 2 value heads of 8 channels each."""
    torch.manual_seed(1)
    shapes = {"in_proj.weight": (2, 44, 3), "conv1d.weight": (2, 24, 4), "A_log": (4,), "out_norm.weight": (8,)}
    masters = {f"mixer.{name}": torch.randn(shape) for name, shape in shapes.items()}
    rows = masters["mixer.in_proj.weight"]
    parts = [rows[:, begin:end].flatten() for begin, end in ((0, 4), (4, 8), (8, 24), (24, 40), (40, 42), (42, 44))]
    rows = masters["mixer.conv1d.weight"]
    parts += [rows[:, begin:end].flatten() for begin, end in ((0, 4), (4, 8), (8, 24))]
    bucket = torch.cat([*parts, masters["mixer.A_log"], masters["mixer.out_norm.weight"]])
    weights = {name: master.bfloat16() for name, master in masters.items()}
    found = found_in(tmp_path, {f"{GROUP}.bucket_idx_0": bucket}, weights)
    for name, master in masters.items():
        assert found.tensors[f"optimizer.exp_avg.{name}"].read().equal(master.flatten() * 10), name


def test_equal_weights_are_told_apart_by_their_order_and_this_is_said(tmp_path: Path) -> None:
    """Norms whose main weights differ from 1 by less than bfloat16 can say. Buffers hold the last layer first."""
    first, last = torch.full((64,), 1.0001), torch.full((64,), 1.0002)
    weights = {"layers.0.norm.weight": first.bfloat16(), "layers.1.norm.weight": last.bfloat16()}
    found = found_in(tmp_path, {f"{GROUP}.bucket_idx_0": torch.cat([last, first])}, weights)
    assert found.tensors["optimizer.param.layers.0.norm.weight"].read().equal(first)
    assert found.tensors["optimizer.param.layers.1.norm.weight"].read().equal(last)
    assert len(found.notes) == 1 and "layers.1.norm.weight have the values of other parameters" in found.notes[0]


def test_refusals(tmp_path: Path) -> None:
    weights = {"a": torch.ones(64).bfloat16()}
    other = GROUP.replace("dp_group_idx_0", "dp_group_idx_1")
    with pytest.raises(UserError, match="flat optimizer state of several model parallel ranks"):
        found_in(tmp_path / "1", {f"{other}.bucket_idx_0": torch.ones(64)}, weights)
    with pytest.raises(UserError, match="does not hold a as the weights have it"):
        found_in(tmp_path / "2", {f"{GROUP}.bucket_idx_0": torch.zeros(64)}, weights)
    with pytest.raises(UserError, match="is no flat optimizer state that is known here"):
        found_in(tmp_path / "3", {f"{GROUP}.other": torch.zeros(64)}, weights)
    assert is_flat_state(GROUP) and not is_flat_state("optimizer.state.exp_avg.a")
