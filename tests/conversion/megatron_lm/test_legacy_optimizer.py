"""Optimizer state of one rank: parameters are found by their order, and a doubt is an error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.conversion.megatron_lm.legacy_optimizer import RankParameter, flat_buckets, plain_states
from megatron.conversion.megatron_lm.names import SourceTensor
from megatron.conversion.megatron_lm.torch_archive import TorchArchive
from megatron.conversion.model import RankTensor
from megatron.core.dist_checkpointing.chunk import MASTER
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3).bfloat16(), "a.bias": torch.ones(2, dtype=torch.bfloat16)}


def saved(**changes: Any) -> dict[str, Any]:
    """State of a matrix and a vector, in two groups."""
    state = {0: {"exp_avg": WEIGHTS["a.weight"].float() * 2}, 1: {"exp_avg": WEIGHTS["a.bias"].float() * 3}}
    groups = [{"params": [0], "wd_mult": 1.0}, {"params": [1], "wd_mult": 0.0}]
    masters = [[WEIGHTS["a.weight"].float()], [WEIGHTS["a.bias"].float()]]
    return {"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": masters} | changes


def read(
    tmp_path: Path, content: Any, prefix: str = "", keys: Mapping[str, str] | None = None
) -> dict[tuple[str, str], list[float]]:
    """Returns the numbers of all states, by name and kind. `keys`: names of our weights, if they differ."""
    path = tmp_path / "state.pt"
    torch.save(content, path)
    parameters = []
    for name, value in WEIGHTS.items():
        shape = tuple(value.shape)
        tensor = RankTensor(name, prefix + name, shape, Box.whole(shape))
        values = SourceTensor(value.dtype, lambda value=value: value.flatten())
        parameters.append(RankParameter((keys or {}).get(name, name), tensor, values, shape))
    found = plain_states(TorchArchive(path).load(), parameters, path)
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
    with pytest.raises(UserError, match="a parameter group has 2 parameters, but the model has 1"):
        read(tmp_path, saved(optimizer={"state": {0: {}}, "param_groups": groups}))


def test_experts_may_have_groups_of_their_own(tmp_path: Path) -> None:
    experts = saved()
    for group in experts["optimizer"]["param_groups"]:
        group["is_expert_parallel"] = True
    prefix = "decoder.layers.0.mlp.experts.linear_fc1."
    assert read(tmp_path, experts, prefix) == read(tmp_path, saved(), prefix) == read(tmp_path, saved())
    with pytest.raises(UserError, match="a parameter group has 1 parameters, but the model has 0 of this kind"):
        read(tmp_path, experts)


def test_all_experts_of_a_weight_have_a_state(tmp_path: Path) -> None:
    content = saved(fp32_from_fp16_params=None)
    same = {"a.weight": "both", "a.bias": "both"}
    assert read(tmp_path, content, keys=same) == {("both", "exp_avg"): [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 3.0, 3.0]}
    del content["optimizer"]["state"][1]
    with pytest.raises(UserError, match=r"1 of the 2 experts of a\.weight have the optimizer state exp_avg"):
        read(tmp_path, content, keys=same)


def test_buffers_of_old_releases_are_refused(tmp_path: Path) -> None:
    torch.save({0: {}}, tmp_path / "distrib_optim.pt")
    with pytest.raises(UserError, match=r"format of releases before 0\.6"):
        flat_buckets(tmp_path / "distrib_optim.pt")


class Counting(RankParameter):
    """A parameter that counts how often its key is read."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        Counting.reads += name == "key"
        return super().__getattribute__(name)


def test_the_work_grows_with_the_number_of_parameters_not_with_its_square(tmp_path: Path) -> None:
    count, path = 200, tmp_path / "state.pt"
    optimizer = {"state": {n: {"exp_avg": torch.zeros(1)} for n in range(count)}, "param_groups": [{"wd_mult": 0.0}]}
    optimizer["param_groups"][0]["params"] = list(range(count))
    torch.save({"optimizer": optimizer}, path)
    values = SourceTensor(torch.float32, lambda: torch.zeros(1))
    tensors = [RankTensor(f"{n}.bias", f"{n}.bias", (1,), Box.whole((1,))) for n in range(count)]
    parameters = [Counting(tensor.name, tensor, values, (1,)) for tensor in tensors]
    Counting.reads = 0
    assert len(list(plain_states(TorchArchive(path).load(), parameters, path))) == count
    assert Counting.reads <= 3 * count
