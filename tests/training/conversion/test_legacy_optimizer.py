"""Optimizer state of one rank: parameters are found by their order, and a doubt is an error."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.chunk import MASTER
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
from megatron.training.conversion.legacy_layout import RankTensor
from megatron.training.conversion.legacy_optimizer import flat_buckets, plain_states
from megatron.training.conversion.megatron_names import SourceTensor
from megatron.training.conversion.torch_archive import TorchArchive

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3).bfloat16(), "a.bias": torch.ones(2, dtype=torch.bfloat16)}


def saved(**changes: Any) -> dict[str, Any]:
    """State of a matrix and a vector, in two groups."""
    state = {0: {"exp_avg": WEIGHTS["a.weight"].float() * 2}, 1: {"exp_avg": WEIGHTS["a.bias"].float() * 3}}
    groups = [{"params": [0], "wd_mult": 1.0}, {"params": [1], "wd_mult": 0.0}]
    masters = [[WEIGHTS["a.weight"].float()], [WEIGHTS["a.bias"].float()]]
    return {"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": masters} | changes


def read(tmp_path: Path, content: dict[str, Any], prefix: str = "") -> dict[tuple[str, str], list[float]]:
    """Returns the numbers of all states, by name and kind."""
    path = tmp_path / "state.pt"
    torch.save(content, path)
    weights, shapes = {}, {}
    for name, value in WEIGHTS.items():
        shape = tuple(value.shape)
        tensor = RankTensor(name, prefix + name, shape, Box.whole(shape))
        values = SourceTensor(value.dtype, lambda value=value: value.flatten())
        weights[name], shapes[name] = (tensor, Box.whole(shape), values), shape
    found = plain_states(TorchArchive(path).load(), list(WEIGHTS), weights, shapes, path)
    return {(name, kind): values.read().flatten().tolist() for name, kind, values in found}


def test_parameters_are_numbered_in_the_order_of_their_groups(tmp_path: Path) -> None:
    assert read(tmp_path, saved()) == {
        ("a.weight", "exp_avg"): [0.0, 2.0, 4.0, 6.0, 8.0, 10.0],
        ("a.weight", MASTER): [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        ("a.bias", "exp_avg"): [3.0, 3.0],
        ("a.bias", MASTER): [1.0, 1.0],
    }


def test_a_main_weight_must_round_to_its_weight(tmp_path: Path) -> None:
    wrong = saved(fp32_from_fp16_params=[[torch.zeros(2, 3)], [torch.ones(2)]])
    with pytest.raises(UserError, match=r"a\.weight: the main weight at its place does not round to it"):
        read(tmp_path, wrong)


def test_groups_must_have_as_many_parameters_as_the_model(tmp_path: Path) -> None:
    groups = [{"params": [0, 1], "wd_mult": 1.0}]
    with pytest.raises(UserError, match="a parameter group has 2 parameters where the model has 1"):
        read(tmp_path, saved(optimizer={"state": {0: {}}, "param_groups": groups}))


def test_experts_of_an_optimizer_that_is_not_sharded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="optimizer state of experts that is not sharded"):
        read(tmp_path, saved(), prefix="decoder.layers.0.mlp.experts.linear_fc1.")


def test_buffers_of_old_releases_are_refused(tmp_path: Path) -> None:
    torch.save({0: {}}, tmp_path / "distrib_optim.pt")
    with pytest.raises(UserError, match=r"format of releases before 0\.6"):
        flat_buckets(tmp_path / "distrib_optim.pt")
