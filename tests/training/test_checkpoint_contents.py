"""The tensors that a checkpoint keeps of a run."""

from pathlib import Path

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import SmallModel
from support.small_run import PRECISIONS, SmallRun

from megatron.core.dist_checkpointing.checkpoint_selection import open_newest
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.training.checkpoint_contents import (
    checkpoint_bytes,
    optimizer_chunks_to_load,
    weight_chunks,
    weights_are_finite,
)


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
