"""Checkpoints saved under one strategy are loaded under another, equal to the bit, in real files by real ranks."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from support.pool import Pool
from support.sharding import STRATEGIES, SlicesByName, backward, groups_of, joined, slices, small_model, wrap
from torch import Tensor, nn

from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.writing import save
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.initializers import Normal
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters import declare, initialize_parameters, name_parameters

# (strategy, ranks, instances)
SAVED = {"replicated": ("no_shard", 2, 1), "ZeRO 1": ("optim", 4, 1), "ZeRO 3": ("optim_grads_params", 2, 1)}
LOADED = {
    "one process": ("no_shard", 1, 1),
    "ZeRO 2": ("optim_grads", 2, 1),
    "ZeRO 3": ("optim_grads_params", 4, 1),
    "replicas of ZeRO 1": ("optim", 4, 2),
    "replicas of ZeRO 3": ("optim_grads_params", 4, 2),
}


def train_and_save(layout: tuple[str, int, int], dtype: torch.dtype, root: str) -> SlicesByName:
    """Two steps; what this rank holds of weights, masters and moments."""
    strategy, ranks, instances = layout
    groups = groups_of(ranks, instances)
    ddp, optimizer = wrap(small_model(dtype), groups, instances, **STRATEGIES[strategy])
    for step in range(2):
        ddp.zero_grad_buffer()
        backward(ddp, step, 1)
        finalize_model_grads([ddp])
        optimizer.step_on_device()
    chunks = [*ddp.weight_chunks(), *optimizer.state_chunks()]
    save(Path(root), chunks, step=2, common=optimizer.common_state(), config={}, layout={}, group=groups.dp_cp)
    found = slices(chunks)
    groups.close()
    return found


def load_and_train(
    layout: tuple[str, int, int], dtype: torch.dtype, root: str
) -> tuple[SlicesByName, SlicesByName, int]:
    """What a rank of another layout reads into a fresh model, and its weights after one step more."""
    strategy, ranks, instances = layout
    groups = groups_of(ranks, instances)
    model = small_model(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ddp, optimizer = wrap(model, groups, instances, **STRATEGIES[strategy])
    chunks = [*ddp.weight_chunks(), *optimizer.state_chunks()]
    loaded = load(Path(root), chunks, group=groups.dp_cp, log=lambda *words: None)
    assert loaded is not None
    optimizer.load_common_state(loaded.manifest.common)
    found = slices(chunks)
    ddp.zero_grad_buffer()
    backward(ddp, 2, 1)
    finalize_model_grads([ddp])
    optimizer.step_on_device()
    after = slices(ddp.weight_chunks())
    groups.close()
    return found, after, optimizer.common_state()["update_count"]


@pytest.mark.fast("ZeRO 1-dtype1", "ZeRO 3-dtype0")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("saved", SAVED)
def test_any_placement_loads_any_other(pool: Pool, saved: str, dtype: torch.dtype, tmp_path: Path) -> None:
    written = joined(pool.run(train_and_save, SAVED[saved][1], SAVED[saved], dtype, str(tmp_path)))
    assert any(name.startswith("optimizer.param.") for name in written) == (dtype is torch.bfloat16)
    weights: list[dict[str, Tensor]] = []
    for layout in LOADED.values():
        answers = pool.run(load_and_train, layout[1], layout, dtype, str(tmp_path))
        read = joined([found for found, _, _ in answers])
        assert read.keys() == written.keys()
        for name, values in written.items():
            assert values.abs().sum() > 0
            assert torch.equal(read[name], values), name
        assert {count for _, _, count in answers} == {3}
        weights.append(joined([after for _, after, _ in answers]))
    # They go on alike, up to the order of sums; a bfloat16 weight may be rounded the other way.
    for other in weights[1:]:
        for name, values in weights[0].items():
            assert torch.allclose(other[name], values, rtol=1e-11 if dtype is torch.float64 else 2e-2, atol=0.0), name


class Tied(nn.Module):
    """A chunk that holds a copy of the table and something of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.config = None
        self.own = nn.ModuleDict({str(number): nn.Linear(10, 20, bias=False)})
        self.table = nn.Parameter(torch.empty(30, 7))
        declare(self.own[str(number)].weight, Normal(1.0))
        declare(self.table, Normal(1.0), tied=True)
        name_parameters(self)
        initialize_parameters(self, 1)


def two_chunks(strategy: str, root: str, reads: bool) -> SlicesByName:
    """Save or load a model whose two chunks, on the same ranks, both hold a tied table."""
    groups = groups_of(2)
    config = DistributedDataParallelConfig(**STRATEGIES[strategy])
    chunks = [DistributedDataParallel(m, config, m, pg_collection=groups) for m in (Tied(0), Tied(1))]
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), chunks)
    live = [*chain(*(chunk.weight_chunks() for chunk in chunks)), *optimizer.state_chunks()]
    if reads:
        for chunk in live:
            chunk.tensor.fill_(-1.0)
        assert load(Path(root), live, group=groups.dp_cp, log=lambda *words: None) is not None
    else:
        for chunk in optimizer.state_chunks():
            first = chunk.range[0]
            chunk.tensor.copy_(torch.arange(first, first + chunk.tensor.numel()))
        save(Path(root), live, step=1, common={}, config={}, layout={}, group=groups.dp_cp)
    found = {(f"{number}:{c.name}", c.range): c.tensor.double().clone() for number, c in enumerate(live)}
    groups.close()
    return found


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_copies_on_one_rank_are_written_once_and_read_into_both(pool: Pool, strategy: str, tmp_path: Path) -> None:
    written = pool.run(two_chunks, 2, strategy, str(tmp_path), False)
    read = pool.run(two_chunks, 2, strategy, str(tmp_path), True)
    for before, after in zip(written, read, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
