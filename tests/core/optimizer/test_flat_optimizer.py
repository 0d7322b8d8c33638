"""The flat optimizer against formulas written out, one parameter at a time, in float64."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import SmallModel
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.optimizer import FlatOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.muon import Muon
from megatron.core.parameters import info_of

LR, BETA1, BETA2, EPS, DECAY, MOMENTUM = 0.05, 0.9, 0.95, 1e-8, 0.1, 0.9


def build(
    dtype: torch.dtype = torch.float64,
    overrides: dict[ParamKey, dict[str, Any]] | None = None,
    stop_on_nonfinite: bool = False,
    padded: int = 0,
    **settings: Any,
) -> tuple[DistributedDataParallel, FlatOptimizer]:
    dist = torch.distributed
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    groups = ProcessGroupCollection.from_grid(RankGrid(world), rank)
    model = SmallModel(dtype=dtype, padded=padded)
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model, pg_collection=groups
    )
    chosen = {
        "lr": LR,
        "weight_decay": DECAY,
        "adam_beta1": BETA1,
        "adam_beta2": BETA2,
        "adam_eps": EPS,
        "sgd_momentum": MOMENTUM,
        "clip_grad": 1.0,
    }
    config = OptimizerConfig(**(chosen | settings))
    optimizer = get_megatron_optimizer(config, [ddp], overrides, stop_on_nonfinite=stop_on_nonfinite)
    assert isinstance(optimizer, FlatOptimizer)
    return ddp, optimizer


def set_gradients(ddp: DistributedDataParallel, step: int, size: float = 1.0, scale: float = 1.0) -> dict[str, Tensor]:
    """Random gradients of so many units of norm for each parameter, times a loss scale; returns them in float64."""
    ddp.zero_grad_buffer()
    gradients = {}
    for number, parameter in enumerate(ddp.parameters()):
        generator = torch.Generator().manual_seed(100 * step + number)
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * size
        info = info_of(parameter)
        gradient.view(-1)[info.box.numel :] = 0.0
        parameter.main_grad.copy_(gradient * scale)
        gradients[info.name] = gradient
    return gradients


def reference(rule: str, weights: dict[str, Tensor], steps: list[dict[str, Tensor]], clip: float) -> dict[str, Tensor]:
    w = {name: value.clone() for name, value in weights.items()}
    m = {name: torch.zeros_like(value) for name, value in w.items()}
    v = {name: torch.zeros_like(value) for name, value in w.items()}
    for t, gradients in enumerate(steps, 1):
        norm = sum(g.square().sum() for g in gradients.values()).sqrt()  # type: ignore[union-attr]
        factor = min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0
        for name, gradient in gradients.items():
            g = gradient * factor
            decay = DECAY if w[name].dim() > 1 else 0.0
            if rule == "sgd":
                m[name] = MOMENTUM * m[name] + g + decay * w[name]
                w[name] -= LR * m[name]
                continue
            if rule == "adam":
                g = g + decay * w[name]
            else:
                w[name] *= 1 - LR * decay
            m[name] = BETA1 * m[name] + (1 - BETA1) * g
            v[name] = BETA2 * v[name] + (1 - BETA2) * g**2
            w[name] -= LR * (m[name] / (1 - BETA1**t)) / ((v[name] / (1 - BETA2**t)).sqrt() + EPS)
    return w


def weights_of(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return {info_of(p).name: p.detach().double().clone() for p in ddp.parameters()}


def error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(((got[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)


RULES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam": {"decoupled_weight_decay": False},
    "sgd": {"optimizer": "sgd"},
}


@pytest.mark.parametrize("clip", [1.0, 0.0, 1e6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
@pytest.mark.parametrize("rule", RULES)
def test_updates_follow_the_formulas(rule: str, dtype: torch.dtype, tolerance: float, clip: float) -> None:
    ddp, optimizer = build(dtype, clip_grad=clip, **RULES[rule])
    before, steps = weights_of(ddp), []
    for step in range(5):
        steps.append(set_gradients(ddp, step))
        result = optimizer.step_on_device()
        assert result.update_applied
        exact = sum(g.square().sum() for g in steps[-1].values()).sqrt()  # type: ignore[union-attr]
        assert abs(result.grad_norm - exact) < tolerance * exact
    assert error(weights_of(ddp), reference(rule, before, steps, clip)) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_keep_main_weights(dtype: torch.dtype) -> None:
    ddp, optimizer = build(dtype)
    before, steps = weights_of(ddp), []
    for step in range(5):
        steps.append(set_gradients(ddp, step))
        optimizer.step()
    expected = reference("adamw", before, steps, clip=1.0)
    state = optimizer.state_dict()["state"]
    main = {name: state[f"optimizer.param.{name}"].view_as(value).double() for name, value in expected.items()}
    assert error(main, expected) < 2e-6
    for name, value in weights_of(ddp).items():
        assert torch.equal(value, main[name].float().to(dtype).double()), name


def test_model_weights_wide_enough_have_no_copy() -> None:
    for dtype in (torch.float32, torch.float64):
        ddp, optimizer = build(dtype)
        assert optimizer.states[0].weights.decode() is ddp.units[0].weight_shard
        assert optimizer.states[0].weights.decode().data_ptr() == ddp.units[0].param_buffer.data_ptr()
        assert not any("optimizer.param." in chunk.name for chunk in optimizer.state_chunks())


def snapshot(ddp: DistributedDataParallel, optimizer: FlatOptimizer) -> dict[str, Tensor]:
    return weights_of(ddp) | optimizer.state_dict()["state"]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_is_not_finite_changes_nothing(rule: str, dtype: torch.dtype, bad: float) -> None:
    runs = []
    for with_bad in (True, False):
        ddp, optimizer = build(dtype, **RULES[rule])
        set_gradients(ddp, 0)
        assert optimizer.step()[0]
        if with_bad:
            before = snapshot(ddp, optimizer)
            set_gradients(ddp, 1)
            ddp.units[1].grad_buffer[3] = bad
            assert optimizer.step() == (False, None, None)
            assert same(snapshot(ddp, optimizer), before)
            assert optimizer.common_state()["update_count"] == 1
        set_gradients(ddp, 2)
        assert optimizer.step()[0]
        runs.append(snapshot(ddp, optimizer))
    assert same(*runs)


def test_stop_mode_holds_the_state_of_the_last_good_step() -> None:
    for flags in ({"gradient": False, "loss": True}, {"gradient": True, "loss": False}):
        ddp, optimizer = build(torch.float32, stop_on_nonfinite=True)
        set_gradients(ddp, 0)
        assert optimizer.step_on_device(torch.tensor(True)).update_applied
        before = snapshot(ddp, optimizer)
        set_gradients(ddp, 1)
        if not flags["gradient"]:
            ddp.units[0].grad_buffer[0] = float("nan")
        assert not optimizer.step_on_device(torch.tensor(flags["loss"])).update_applied
        set_gradients(ddp, 2)
        assert not optimizer.step_on_device(torch.tensor(True)).update_applied
        assert optimizer.halted
        assert same(snapshot(ddp, optimizer), before)


def test_float16_overflow_is_skipped_also_in_stop_mode_and_leaves_the_loss_to_stop() -> None:
    ddp, optimizer = build(torch.float16, stop_on_nonfinite=True, fp16=True, initial_loss_scale=1024.0, hysteresis=1)
    set_gradients(ddp, 0)
    ddp.units[0].grad_buffer[0] = float("inf")
    assert not optimizer.step_on_device(torch.tensor(True)).update_applied
    assert not optimizer.halted
    assert optimizer.get_loss_scale() == 512.0
    set_gradients(ddp, 1)
    assert not optimizer.step_on_device(torch.tensor(False)).update_applied
    assert optimizer.halted
    assert optimizer.grad_scaler is not None
    assert optimizer.grad_scaler.state_dict()["growth_tracker"] == 0


def test_loss_scale_cancels() -> None:
    plain_ddp, plain = build(torch.float32)
    ddp, optimizer = build(torch.float32, loss_scale=4096.0)
    for step in range(3):
        set_gradients(plain_ddp, step)
        set_gradients(ddp, step, scale=4096.0)
        expected, got = plain.step_on_device(), optimizer.step_on_device()
        assert torch.equal(expected.grad_norm, got.grad_norm)
    assert error(weights_of(ddp), weights_of(plain_ddp)) < 1e-6


def test_a_script_may_set_the_rate_as_a_number() -> None:
    runs = []
    for as_number in (False, True):
        ddp, optimizer = build(torch.float32)
        for group in optimizer.param_groups:
            if as_number:
                group["lr"] = 0.02
            else:
                group["lr"].fill_(0.02)
        set_gradients(ddp, 0)
        optimizer.step()
        runs.append(weights_of(ddp))
    assert same(*runs)


def all_ones_norm(dtype: torch.dtype) -> tuple[float, int, int]:
    ddp, optimizer = build(dtype, log_num_zeros_in_grad=True, padded=3)
    for parameter in ddp.parameters():
        parameter.main_grad.fill_(1.0)
    ddp.units[-1].slots[-1].box_view_in(ddp.units[-1].grad_buffer)[0] = 0.0
    result = optimizer.step_on_device()
    assert result.num_zeros is not None
    count = sum(info_of(parameter).box.numel for parameter in ddp.parameters())
    return result.grad_norm.item(), int(result.num_zeros.item()), count


@pytest.mark.parametrize("world", [1, 2])
def test_all_gradients_one_give_the_square_root_of_the_number_of_parameters(world: int) -> None:
    for norm, zeros, count in run_on_ranks(all_ones_norm, world, torch.float64):
        assert norm == pytest.approx((count - 1) ** 0.5, rel=1e-14)
        assert zeros == 1


def one_rank_loses() -> tuple[bool, bool]:
    ddp, optimizer = build(torch.float64)
    set_gradients(ddp, 0)
    finite = torch.tensor(torch.distributed.get_rank() != 1)
    first = optimizer.step_on_device(finite).update_applied
    return bool(first), bool(optimizer.step_on_device(torch.tensor(True)).update_applied)


def test_one_rank_whose_loss_is_not_finite_stops_the_update_on_all() -> None:
    assert run_on_ranks(one_rank_loses, 3) == [(False, True)] * 3


def test_groups_carry_decay_and_rate() -> None:
    overrides = {ParamKey(name="layers.1.*"): {"max_lr": 0.5, "wd_mult": 2.0}}
    ddp, optimizer = build(torch.float64, overrides, decoupled_weight_decay=True)
    names = [sorted(info_of(p).name for p in group["params"]) for group in optimizer.param_groups]
    assert names == [
        ["embedding.table", "layers.0.weight", "layers.2.weight"],
        ["layers.1.bias", "layers.1.norm", "layers.1.weight"],
        ["layers.0.bias", "layers.0.norm", "layers.2.bias", "layers.2.norm"],
    ]
    assert [group["wd_mult"] for group in optimizer.param_groups] == [1.0, 2.0, 0.0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, 2 * DECAY, 0.0]
    assert [group["lr"].item() for group in optimizer.param_groups] == [LR, 0.5, LR]
    before = weights_of(ddp)
    set_gradients(ddp, 0, size=0.0)
    optimizer.step()
    for name, value in weights_of(ddp).items():
        factor = 1 - 0.5 * 2 * DECAY if name.startswith("layers.1.") else 1 - LR * DECAY if value.dim() > 1 else 1.0
        assert torch.allclose(value, before[name] * factor, rtol=1e-15, atol=0.0), name


def test_state_goes_out_and_comes_back() -> None:
    def run(steps: range, start: Callable[[DistributedDataParallel, FlatOptimizer], None]) -> dict[str, Tensor]:
        ddp, optimizer = build(torch.bfloat16, fp16=False, padded=2)
        start(ddp, optimizer)
        for step in steps:
            set_gradients(ddp, step)
            optimizer.step()
        saved.update(model={k: v.clone() for k, v in ddp.state_dict().items()}, optimizer=optimizer.state_dict())
        return snapshot(ddp, optimizer)

    def resume(ddp: DistributedDataParallel, optimizer: FlatOptimizer) -> None:
        ddp.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    saved: dict[str, Any] = {}
    through = run(range(4), lambda ddp, optimizer: None)
    run(range(2), lambda ddp, optimizer: None)
    assert same(run(range(2, 4), resume), through)


def test_reload_takes_the_models_weights() -> None:
    ddp, optimizer = build(torch.bfloat16)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.fill_(0.5)
    optimizer.reload_model_params()
    set_gradients(ddp, 0, size=0.0)
    optimizer.param_groups[0]["lr"].zero_()
    optimizer.step()
    assert all((parameter == 0.5).all() for parameter in ddp.parameters())


def test_chunks_are_live_memory_without_padding() -> None:
    ddp, optimizer = build(torch.bfloat16, padded=4)
    chunks = {chunk.name: chunk for chunk in optimizer.state_chunks()}
    table = chunks["optimizer.exp_avg.embedding.table"]
    assert (table.global_shape, table.tensor.numel(), table.holders) == ((13, 6), 78, (0,))
    table.tensor.fill_(3.0)
    parameter = ddp.module.embedding.table
    assert (optimizer.state[parameter]["exp_avg"][:13] == 3.0).all()
    assert not optimizer.state[parameter]["exp_avg"][13:].any()
    kinds = {name.split(".")[1] for name in chunks}
    assert kinds == {"exp_avg", "exp_avg_sq", "param"}


def test_a_bare_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"SmallModel: wrap it in .*DistributedDataParallel"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [SmallModel()])


def test_the_settings_of_each_parameter_as_a_file(tmp_path: Path) -> None:
    """--dump-param-to-param-group-map."""
    path = tmp_path / "groups.json"
    ddp, _ = build()
    get_megatron_optimizer(OptimizerConfig(lr=LR), [ddp], dump_param_to_param_group_map=str(path))
    groups = json.loads(path.read_text())
    assert list(groups) == sorted(groups) and {group["wd_mult"] for group in groups.values()} == {0.0, 1.0}
    with pytest.raises(UserError, match=r"--dump-param-to-param-group-map .*No such file"):
        get_megatron_optimizer(OptimizerConfig(lr=LR), [ddp], dump_param_to_param_group_map=str(tmp_path / "a" / "b"))


def order_of_updates_and_gathers(optimizer_name: str) -> list[str]:
    """The units in the order in which their update and their gather start, in the second step."""
    dist = torch.distributed
    groups = ProcessGroupCollection.from_grid(RankGrid(dist.get_world_size()), dist.get_rank())
    model = SmallModel(dtype=torch.float32)
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    ddp = DistributedDataParallel(model.config, sharded, model, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=LR, optimizer=optimizer_name), [ddp])
    assert isinstance(optimizer, FlatOptimizer)
    seen: list[str] = []
    for number, unit in enumerate(ddp.units):
        gather = unit.start_all_gather

        def started(number: int = number, gather: Callable[[], None] = gather) -> None:
            seen.append(f"gather {number}")
            gather()

        unit.start_all_gather = started  # type: ignore[method-assign]
    update = optimizer._update_segment

    def unit_of(gradient: Tensor) -> int:
        shards = [unit.gradient_shard for unit in ddp.units]
        ends = [shard.data_ptr() + shard.nbytes for shard in shards]
        return next(n for n, shard in enumerate(shards) if shard.data_ptr() <= gradient.data_ptr() < ends[n])

    def updated(segment: Any, *arguments: Any) -> None:
        if not isinstance(segment, Muon):
            seen.append(f"update {unit_of(segment.gradient)}")
        update(segment, *arguments)

    optimizer._update_segment = updated  # type: ignore[method-assign]
    for step in range(2):
        seen.clear()
        ddp.zero_grad_buffer()
        for parameter in ddp.parameters():
            parameter.main_grad.fill_(0.1 * (step + 1))
        optimizer.step_on_device()
    return list(dict.fromkeys(seen))


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_the_first_weights_are_gathered_while_others_are_updated(optimizer: str) -> None:
    for seen in run_on_ranks(order_of_updates_and_gathers, 2, optimizer):
        last = max(place for place, event in enumerate(seen) if event.startswith("update"))
        assert "gather 0" in seen[:last], seen
        assert next(event for event in seen if event.startswith("gather")) == "gather 0"
