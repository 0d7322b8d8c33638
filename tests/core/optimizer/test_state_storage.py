"""State in 8 and 16 bits: what is lossless is so to the bit, what is rounded is rounded once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.sharding import STRATEGIES, backward, groups_of, joined, small_model
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import FlatOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.state_storage import SCALE_BLOCK, Scaled, WithRemainder, smallest, split_float32

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8


def floats() -> Tensor:
    """All exponents with the mantissas where rounding changes its mind, and random bits."""
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1_8000, 0x7F_FFFF, 0x7F_8000], dtype=torch.int64)
    bits = (torch.arange(512, dtype=torch.int64) << 23)[:, None] + lows
    drawn = torch.randint(0, 1 << 32, (100_000,), generator=torch.Generator().manual_seed(0))
    return torch.cat([bits.flatten(), drawn]).to(torch.int32).view(F32)


def test_bfloat16_weights_and_remainders_are_float32_to_the_bit() -> None:
    values = floats()
    rounded, remainder = split_float32(values)
    held = WithRemainder(torch.empty_like(rounded), torch.empty_like(remainder))
    held.encode(values)
    back, numbers = held.decode(), ~values.isnan()
    assert torch.equal(back.view(torch.int32)[numbers], values.view(torch.int32)[numbers])
    assert back[~numbers].isnan().all() and held.model_weights[~numbers].isnan().all()
    # The model's weight is the nearest one: only between two equally near ones is it not torch's choice.
    other = rounded.view(torch.int16) != values.bfloat16().view(torch.int16)
    assert (values.view(torch.int32)[other & numbers] & 0xFFFF == 0x8000).all() and other.any()


@pytest.mark.parametrize("is_root", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float8_e4m3fn, 2**-4), (F16, 2**-11)])
def test_scaled_numbers_are_rounded_once(dtype: torch.dtype, rounding: float, is_root: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, generator=generator) * 10.0 ** torch.randint(-9, 5, (1000,), generator=generator)
    values = values[:500].square() if is_root else values[:500]  # sizes far apart in one block
    values[64:128] = 0.0
    held = Scaled(torch.zeros(500, dtype=dtype), torch.ones(8), F32, is_root)
    held.encode(values)
    back = held.decode()
    blocks = torch.nn.functional.pad(values.abs(), (0, 12)).view(8, SCALE_BLOCK).amax(1).repeat_interleave(SCALE_BLOCK)
    largest = blocks[:500].sqrt() if is_root else blocks[:500]
    wanted, got = (values.sqrt(), back.sqrt()) if is_root else (values, back)
    floor = largest * 2 * smallest(dtype) / torch.finfo(dtype).max
    assert ((got - wanted).abs() <= wanted.abs() * rounding * 1.001 + floor).all()
    assert torch.equal(back == 0, values == 0) or not is_root  # a second moment that is not 0 stays so
    again = Scaled(torch.zeros(500, dtype=dtype), torch.ones(8), F32, is_root)
    again.encode(back)
    if not is_root:
        assert torch.equal(again.decode(), back)
    before = [tensor.clone() for tensor in held.movable]
    held.encode(torch.full_like(values, float("nan")), skip=torch.tensor(True))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, held.movable, strict=True))
    held.encode(torch.where(torch.arange(500) == 3, float("nan"), values))
    assert held.decode()[3].isnan()


def test_parts_share_memory_and_scales() -> None:
    held = Scaled(torch.zeros(200, dtype=F16), torch.ones(4), F32)
    held.part(64, 150).encode(torch.arange(86.0))
    assert torch.equal(held.decode()[64:150], torch.arange(86.0)) and not held.decode()[:64].any()


# Whole runs ----------------------------------------------------------------------------------------------------------


def built(name: str, ranks: int, **settings: Any) -> tuple[DistributedDataParallel, FlatOptimizer]:
    model = small_model(BF16)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **STRATEGIES[name])
    ddp = DistributedDataParallel(model.config, config, model, pg_collection=groups_of(ranks))
    chosen = OptimizerConfig(
        lr=0.02, weight_decay=0.1, clip_grad=0.5, bf16=True, use_precision_aware_optimizer=True, **settings
    )
    optimizer = get_megatron_optimizer(chosen, [ddp])
    assert isinstance(optimizer, FlatOptimizer)
    return ddp, optimizer


def train(ddp: DistributedDataParallel, optimizer: FlatOptimizer, steps: Iterator[int] | range) -> None:
    for step in steps:
        ddp.zero_grad_buffer()
        backward(ddp, step, 1)
        ddp.finish_grad_sync()
        optimizer.step_on_device()


def weights_and_masters(optimizer: FlatOptimizer) -> list[Tensor]:
    return [t.clone() for state in optimizer.states for t in (state.unit.weight_shard, state.weights.decode())]


@pytest.mark.parametrize("moments", [{}, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": FP8}], ids=["fp32", "narrow"])
def test_remainders_train_as_float32_masters_to_the_bit(moments: dict[str, Any]) -> None:
    results = []
    for remainders in (True, False):
        ddp, optimizer = built("no_shard", 1, store_param_remainders=remainders, **moments)
        assert isinstance(optimizer.states[0].weights, WithRemainder) == remainders
        train(ddp, optimizer, range(4))
        results.append(weights_and_masters(optimizer))
    assert all(map(torch.equal, *results)) and not torch.equal(results[0][1], results[0][0].float())


@pytest.mark.parametrize("main", [F32, F16])
def test_narrow_moments_train_nearly_as_float32(main: torch.dtype) -> None:
    exact, loose = [
        built("no_shard", 1, main_params_dtype=main_dtype, **moments, adam_beta2=0.8)
        for main_dtype, moments in ((F32, {}), (main, {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8}))
    ]
    before = weights_and_masters(exact[1])
    for ddp, optimizer in (exact, loose):
        train(ddp, optimizer, range(4))
    pairs = zip(weights_and_masters(exact[1])[1::2], weights_and_masters(loose[1])[1::2], before[1::2], strict=True)
    for wanted, got, start in pairs:
        assert (got - wanted).norm() < 0.08 * (wanted - start).norm()


def dtypes_change(name: str, ranks: int, path: str) -> list[dict[str, Tensor]]:
    """Saves a run, loads it with other types, and returns the state before and after, and after a further step."""
    from megatron.core.dist_checkpointing import load, save

    narrow = {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": F16}
    ddp, optimizer = built(name, ranks, **narrow)
    train(ddp, optimizer, range(2))
    save({"optimizer": optimizer.sharded_state_dict()}, path)
    found = [pieces_of(optimizer)]
    train(ddp, optimizer, range(2, 3))
    further = pieces_of(optimizer)
    for settings in (narrow, {"store_param_remainders": False}):
        ddp, optimizer = built(name, ranks, **settings)
        loaded = load({"optimizer": optimizer.sharded_state_dict()}, path)
        optimizer.load_state_dict(loaded["optimizer"])
        found.append(pieces_of(optimizer))
        if settings is narrow:
            train(ddp, optimizer, range(2, 3))
            found += [further, pieces_of(optimizer)]
    return found


def pieces_of(optimizer: FlatOptimizer) -> Any:
    return {(c.name, c.range): c.values().double().clone() for c in optimizer.state_chunks()}


@pytest.mark.parametrize(("name", "ranks"), [("no_shard", 1), ("optim", 2), ("optim_grads_params", 2)])
def test_a_run_may_change_its_types_at_a_checkpoint(name: str, ranks: int, tmp_path: Any) -> None:
    if ranks == 1:
        results = [dtypes_change(name, ranks, str(tmp_path))]
    else:
        results = run_on_ranks(dtypes_change, ranks, name, ranks, str(tmp_path))
    saved, same, further, resumed, widened = (joined([rank[number] for rank in results]) for number in range(5))
    for key in saved:
        assert torch.equal(saved[key], same[key]), key
        assert torch.equal(saved[key], widened[key]), key
        assert torch.equal(further[key], resumed[key]), key
    assert saved
