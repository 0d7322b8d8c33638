"""Optimizer state in host memory: no bit of the numbers changes, and checkpoints do not know."""

from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.sharding import STRATEGIES, backward, groups_of, small_model
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import FlatOptimizer, OptimizerConfig, get_megatron_optimizer, host_state
from megatron.core.optimizer.host_state import choose_offloaded

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8


def built(
    offload: float | None, dtype: torch.dtype = BF16, name: str = "no_shard", ranks: int = 1, **settings: Any
) -> tuple[DistributedDataParallel, FlatOptimizer]:
    model = small_model(dtype)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **STRATEGIES[name])
    ddp = DistributedDataParallel(model.config, config, model, pg_collection=groups_of(ranks))
    words = {} if offload is None else {"optimizer_cpu_offload": True, "optimizer_offload_fraction": offload}
    chosen = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.5, "bf16": dtype is BF16, "fp16": dtype is F16}
    optimizer = get_megatron_optimizer(OptimizerConfig(**chosen | words | settings), [ddp])
    assert isinstance(optimizer, FlatOptimizer)
    return ddp, optimizer


def trained(*arguments: Any, **settings: Any) -> dict[Any, Tensor]:
    """Returns weights and state after three steps, the second of which changes nothing."""
    ddp, optimizer = built(*arguments, **settings)
    for step in range(3):
        ddp.zero_grad_buffer()
        backward(ddp, step, 1)
        ddp.finish_grad_sync()
        optimizer.step_on_device(torch.tensor(step != 1))
    found = {(chunk.name, chunk.range): chunk.values().clone() for chunk in optimizer.state_chunks()}
    return found | {number: unit.weight_shard.clone() for number, unit in enumerate(optimizer.units)}


def assert_equal(found: dict[Any, Tensor], plain: dict[Any, Tensor]) -> None:
    assert found.keys() == plain.keys() and len(found) > 5
    assert [key for key in plain if not torch.equal(found[key], plain[key])] == []


SETTINGS: list[dict[str, Any]] = [
    {},
    {"dtype": F32},
    {"dtype": torch.float64},
    {"dtype": F16},
    {"optimizer": "sgd"},
    {"use_precision_aware_optimizer": True},
    {"use_precision_aware_optimizer": True, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": FP8},
    {"use_precision_aware_optimizer": True, "main_params_dtype": F16, "exp_avg_sq_dtype": F16},
    {"pin_cpu_params": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_bit_changes(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces that end within parameters, on a memory of three pieces."""
    monkeypatch.setattr(host_state, "PIECE", 64)
    plain = trained(None, **settings)
    for fraction in (0.5, 1.0):
        assert_equal(trained(fraction, **settings), plain)


def sharded(name: str) -> bool:
    host_state.PIECE = 64
    assert_equal(trained(1.0, BF16, name, 2), trained(None, BF16, name, 2))
    return True


@pytest.mark.parametrize("name", ["optim", "optim_grads_params"])
def test_no_bit_changes_with_sharded_state(name: str) -> None:
    assert run_on_ranks(sharded, 2, name) == [True, True]


def test_the_state_of_chosen_units_moves() -> None:
    """On the device only what the update needs at a time, and weights that are the model's."""
    _, optimizer = built(0.5)
    sizes = [unit.plan.numel for unit in optimizer.units]
    assert [state.is_offloaded for state in optimizer.states] == choose_offloaded(sizes, 0.5)
    moved = {id(state) for state in optimizer.states if state.is_offloaded}
    assert 0 < len(moved) < len(sizes)
    pieces = {piece.state.model_weights.untyped_storage().data_ptr() for piece in optimizer._host_pieces}
    assert pieces == {s.unit.weight_shard.untyped_storage().data_ptr() for s in optimizer.states if id(s) in moved}
    stays = [segments for each in optimizer._rounds for _, segments in each.segments]  # it is updated as ever
    assert stays and all(w.untyped_storage().data_ptr() not in pieces for s in stays for w in s.model_weights)


def test_even_choice() -> None:
    assert choose_offloaded([4, 4, 4, 4], 0.5) == [False, True, False, True]
    assert choose_offloaded([4, 4, 4, 4], 1.0) == [True] * 4
    assert choose_offloaded([4, 4, 4, 4], 0.0) == [False] * 4
    assert choose_offloaded([100, 1, 1], 0.9) == [False, True, True]


def test_state_and_reload() -> None:
    _, optimizer = built(1.0, use_precision_aware_optimizer=True)
    before = {name: m.shape for moments in optimizer.state.values() for name, m in moments.items()}
    assert set(before) == {"exp_avg", "exp_avg_sq"}
    with torch.no_grad():
        for unit in optimizer.units:
            unit.weight_shard.fill_(0.5)
    optimizer.reload_model_params()
    assert all((state.weights.decode() == 0.5).all() for state in optimizer.states)
