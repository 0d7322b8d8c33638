"""Ranks with different flags are found before groups are made."""

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.launch import launch
from support.processes import run_on_ranks
from support.runs import GPT, TINY

from megatron.core.exceptions import UserError
from megatron.training import pretrain
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch import errors
from megatron.training.launch.same_flags import check_same_flags, differences


def test_each_value_is_told_with_its_ranks() -> None:
    values = [{"--lr": "1.0", "--seed": "1"}, {"--lr": "2.0", "--seed": "1"}, *[{"--lr": "1.0", "--seed": "2"}] * 6]
    assert differences(values, {"--lr", "--seed"}) == [
        "--lr is 1.0 on 7 ranks (0, 2, 3, 4, ...) and 2.0 on rank 1: start every rank with the same flags",
        "--seed is 1 on ranks 0, 1 and 2 on 6 ranks (2, 3, 4, 5, ...): start every rank with the same flags",
    ]
    assert differences([values[0]] * 2, ()) == []
    assert differences(values[:2], {"--seed"}) == [
        "--lr is 1.0 on rank 0 and 2.0 on rank 1: no flag sets it, and hosts with other GPUs or numbers of ranks have "
        "another default; give the flag, or its opposite, to every rank"
    ]


def found_by_a_rank(flags_of_last: str) -> str:
    rank, world = torch.distributed.get_rank(), 3
    flags = f"{TINY} --global-batch-size 6 --mock-data --train-iters 1 --data-cache-path /rank_{rank} "
    flags += f"--metrics-path /rank_{rank}/metrics.jsonl "
    flags += flags_of_last if rank == world - 1 else "--seed 1"
    try:
        check_same_flags(configure(flags.split(), launch_environment=LaunchEnvironment(world, False)))
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("flags_of_last", "found"),
    [
        ("--seed 1", "nothing"),
        ("--seed 2", "--seed is 1 on ranks 0, 1 and 2 on rank 2: start every rank with the same flags"),
    ],
)
def test_every_rank_says_the_same(flags_of_last: str, found: str) -> None:
    assert run_on_ranks(found_by_a_rank, 3, flags_of_last) == [found] * 3


def found_with_hosts(flags: str) -> str:
    """Two hosts with GPUs, one of 3 ranks and one of 4, as in an uneven job."""
    rank, layout = torch.distributed.get_rank(), "--tensor-model-parallel-size 2 --sequence-parallel --bf16"
    sizes = "--seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0 --hidden-dropout 0"
    host = LaunchEnvironment(2, True, ranks_of_host=3 + rank)
    try:
        check_same_flags(
            configure(f"{TINY} --mock-data --train-iters 1 {sizes} {layout} {flags}".split(), launch_environment=host)
        )
    except UserError as error:
        return str(error)
    return "nothing"


def test_a_default_that_differs_between_hosts_is_told_as_such() -> None:
    said = run_on_ranks(found_with_hosts, 2, "")[0]
    assert said.startswith("--tp-comm-overlap is False on rank 0 and True on rank 1: no flag sets it, and hosts with")
    assert run_on_ranks(found_with_hosts, 2, "--no-tp-comm-overlap") == ["nothing"] * 2


def _with_flags_of_rank() -> None:
    if os.environ["RANK"] == "1":
        sys.argv += ["--tensor-model-parallel-size", "2", "--lr", "0.5"]
    with mock.patch.object(errors, "_HEAD_START_OF_FIRST_RANK", 0.1):
        pretrain(GPT)


def test_a_run_ends_before_its_groups_differ(tmp_path: Path) -> None:
    program = launch("--mock-data --train-iters 1 --lr 0.1", 2, tmp_path, _with_flags_of_rank)
    assert program.exit_codes() == [2, 2]
    assert "--lr is 0.1 on rank 0 and 0.5 on rank 1" in program.output(0)
    assert "--tensor-model-parallel-size is 1 on rank 0 and 2 on rank 1" in program.output(0)
