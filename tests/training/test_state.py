"""The counts of a run, saved to and restored from a checkpoint; the tensors that a checkpoint keeps of a run."""

import dataclasses
from pathlib import Path

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import SmallModel
from support.small_run import PRECISIONS, SmallRun

from megatron.core.dist_checkpointing.checkpoint_selection import open_newest
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.training.state import (
    TrainState,
    checkpoint_bytes,
    optimizer_chunks_to_load,
    weight_chunks,
    weights_are_finite,
)

STATE = TrainState(3, 96, 4, 8, 1536, 2.5e9)


def test_json_and_back() -> None:
    assert STATE.to_json() == dataclasses.asdict(STATE)
    assert TrainState.from_json(STATE.to_json()) == STATE


def test_counts_that_an_older_release_did_not_save_start_at_zero() -> None:
    assert TrainState.from_json({"iteration": 7}) == TrainState(iteration=7)


def test_an_unknown_count_is_named() -> None:
    with pytest.raises(UserError, match="holds epoch, shard, which this release does not know"):
        TrainState.from_json({"iteration": 7, "shard": 1, "epoch": 2})


def test_steps_are_counted_and_skipped_ones_twice() -> None:
    state = TrainState()
    state.add_step(8, tokens=256, operations=1.5e9)
    assert state == TrainState(1, 8, 0, 0, 256, 1.5e9)
    state.add_skipped_step(4)
    assert state == TrainState(2, 12, 4, 0, 256, 1.5e9)


def test_restore_changes_the_object_that_others_hold() -> None:
    state = held = TrainState()
    state.restore(STATE)
    assert held == STATE and held is not STATE


def test_weights_with_and_without_the_wrapper_are_the_same_chunks_over_live_memory():
    run = SmallRun.make()
    wrapped = {chunk.name: chunk for chunk in weight_chunks([run.model], run.checkpoints.groups)}
    plain = {chunk.name: chunk for chunk in weight_chunks([run.model.module], run.checkpoints.groups)}
    assert wrapped.keys() == plain.keys() and len(wrapped) == 10
    for name, chunk in wrapped.items():
        assert torch.equal(chunk.flat, plain[name].flat) and chunk.global_shape == plain[name].global_shape
        chunk.flat.fill_(7.0)
        assert plain[name].flat.eq(7.0).all()


def test_main_weights_are_loaded_without_optimizer_state_too():
    run = SmallRun.make(**PRECISIONS["bf16 with masters"])
    every = [chunk.name for chunk in optimizer_chunks_to_load(run.optimizer, True)]
    masters = [chunk.name for chunk in optimizer_chunks_to_load(run.optimizer, False)]
    assert 0 < len(masters) < len(every) and set(masters) < set(every)
    assert len(masters) == len(list(weight_chunks([run.model], run.checkpoints.groups)))


def bytes_of_rank(folder: str, precision: str, flags: str) -> float:
    run = SmallRun.make(f"--save {folder} {flags}", **PRECISIONS[precision]).train(1)
    run.save()
    return checkpoint_bytes(run.parts, run.checkpoints.groups, not run.checkpoints.flags.no_save_optim)


@pytest.mark.parametrize("precision", [*PRECISIONS])
def test_bytes_are_those_of_the_stored_tensors(tmp_path: Path, precision: str) -> None:
    for ranks, flags in ((1, ""), (2, ""), (1, "--no-save-optim")):
        folder = tmp_path / f"{ranks}{flags}"
        shares = run_on_ranks(bytes_of_rank, ranks, str(folder), precision, flags)
        stored = open_newest(folder).catalogue.values()
        sizes = [part.chunk.nbytes for parts in stored for part in parts]
        assert sum(shares) == sum(sizes) and len(set(shares)) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_found(dtype, bad):
    groups = ProcessGroupCollection.from_grid(RankGrid(1), 0)
    model = SmallModel(dtype=dtype, seed=5)
    weight = list(model.parameters())[-1].data.view(-1)
    weight[0] = torch.finfo(dtype).max
    assert weights_are_finite([model], groups)
    weight[-1] = bad
    assert not weights_are_finite([model], groups)


def spoiled_on_rank_1() -> bool:
    run = SmallRun.make()
    if torch.distributed.get_rank() == 1:
        run.model.units[0].param_buffer[0] = torch.nan
    return weights_are_finite([run.model], run.checkpoints.groups)


def test_all_ranks_know_of_a_weight_that_is_not_finite_on_one():
    assert run_on_ranks(spoiled_on_rank_1, 2) == [False, False]
