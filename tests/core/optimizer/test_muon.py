"""Muon: its formulas in one process, and the same weights under every layout. Gradients are functions of canonical
indices, so no model runs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from torch import Tensor

from megatron.core.dist_checkpointing import load, save
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.initializers import Normal
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import FlatOptimizer, OptimizerConfig, get_megatron_optimizer, muon, muon_triton
from megatron.core.optimizer.newton_schulz import newton_schulz
from megatron.core.parameters import ParameterInfo, canonical_index, draw_range, info_of, initialize_parameters
from megatron.core.transformer.transformer_config import TransformerConfig

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.9
SIZES = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "gated_linear_unit": True,
    "add_bias_linear": False,
}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "moe_grouped_gemm": True}


def build(
    ddp: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    grid: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> tuple[DistributedDataParallel, FlatOptimizer]:
    dist = torch.distributed
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    groups = ProcessGroupCollection.from_grid(RankGrid(world, **(grid or {})), rank)
    sizes = {**SIZES, **(model or {})}
    config = TransformerConfig(
        **sizes,
        tensor_model_parallel_size=groups.size("tp"),
        expert_model_parallel_size=groups.size("ep"),
        expert_tensor_parallel_size=groups.size("expt_tp"),
        sequence_parallel="num_moe_experts" in sizes and groups.size("tp") > 1,
        params_dtype=dtype,
    )
    experts = sizes.get("num_moe_experts")
    spec = get_gpt_layer_local_spec(experts, sizes.get("moe_grouped_gemm", False))
    made = GPTModel(config, spec, vocab_size=12, max_sequence_length=8, pg_collection=groups)
    initialize_parameters(made, 3)
    chosen = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp or {}))
    wrapped = DistributedDataParallel(config, chosen, made, pg_collection=groups)
    given = {"optimizer": "muon", "lr": LR, "weight_decay": DECAY, "muon_momentum": MOMENTUM, **settings}
    optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=0.0, **given), [wrapped])
    assert isinstance(optimizer, FlatOptimizer)
    return wrapped, optimizer


def step(optimizer: FlatOptimizer, number: int) -> None:
    """A step with gradients that are drawn anew for each step."""
    for unit in optimizer.units:
        unit.gradient_shard.zero_()
        for part in unit.parameter_slices:
            info = dataclasses.replace(part.info, init=Normal(1.0))
            first = 0 if part.flat_range is None else part.flat_range[0]
            draw_range(part.view_in(unit.gradient_shard), info, first, (number, len(part.info.name)))
    optimizer.step_on_device()


def weights(ddp: DistributedDataParallel) -> dict[Any, float]:
    """Every element that this rank has, by name and canonical index."""
    ddp.start_param_sync(force_sync=True)
    found: dict[Any, float] = {}
    for chunk in ddp.weight_chunks():
        begin, end = chunk.range
        index = canonical_index(ParameterInfo(chunk.global_shape, chunk.box, Normal(1.0)), begin, end - begin)
        found |= {(chunk.name, place): value for place, value in zip(index.tolist(), chunk.flat.tolist(), strict=True)}
    return found


def trained(case: dict[str, Any], steps: int = 2) -> dict[Any, float]:
    settings = dict(case)
    limit = settings.pop("elements_at_once", None)
    before = muon._ELEMENTS_AT_ONCE
    muon._ELEMENTS_AT_ONCE = limit or before
    try:
        ddp, optimizer = build(**settings)
        for number in range(steps):
            step(optimizer, number)
        return weights(ddp)
    finally:
        muon._ELEMENTS_AT_ONCE = before


# One process ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_updates_follow_the_formulas(nesterov: bool) -> None:
    ddp, optimizer = build(muon_use_nesterov=nesterov, muon_scale_mode="shape_scaling", muon_extra_scale_factor=0.5)
    parameters = {info_of(p).name: p for p in ddp.parameters()}
    mlp, qkv = (parameters[f"decoder.layers.0.{n}.weight"] for n in ("mlp.linear_fc1", "self_attention.linear_qkv"))
    expected = [p.detach().clone() for p in (mlp, qkv)]
    momenta = [torch.zeros_like(w) for w in expected]
    for number in range(3):
        step(optimizer, number)
        for place, parameter in enumerate((mlp, qkv)):
            gradient = parameter.main_grad
            momenta[place] = MOMENTUM * momenta[place] + (1 - MOMENTUM) * gradient
            m = momenta[place]
            direction = (1 - MOMENTUM) * gradient + MOMENTUM * m if nesterov else m
            parts = [direction]
            if place == 1:  # [groups, two queries, key and value, d, h]
                heads = direction.view(2, 4, 4, 16)
                parts = [heads[:, :2].reshape(-1, 16), heads[:, 2].reshape(-1, 16), heads[:, 3].reshape(-1, 16)]
            made = [0.5 * max(1.0, len(p) / 16) ** 0.5 * newton_schulz(p[None], 5)[0].view(-1, 16) for p in parts]
            update = made[0]
            if place == 1:
                q, k, v = made
                update = torch.cat([q.view(2, 2, 4, 16), k.view(2, 1, 4, 16), v.view(2, 1, 4, 16)], 1).view(-1, 16)
            expected[place] = expected[place] * (1 - LR * DECAY) - LR * update
    assert torch.allclose(mlp, expected[0], rtol=0, atol=1e-12) and torch.allclose(qkv, expected[1], rtol=0, atol=1e-12)


def test_embeddings_norms_and_head_are_updated_by_adam() -> None:
    _, optimizer = build(model=EXPERTS)
    kinds = {info_of(p).name.removeprefix("decoder.layers.0."): set(s) for p, s in optimizer.state.items()}
    matrices = {name for name, state in kinds.items() if state == {"momentum_buffer"}}
    assert matrices == {
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.router.weight",
        "mlp.experts.linear_fc1.weight",
        "mlp.experts.linear_fc2.weight",
    }
    assert all(state == {"exp_avg", "exp_avg_sq"} for name, state in kinds.items() if name not in matrices)
    assert [group["use_muon"] for group in optimizer.param_groups].count(True) == 2  # one for each grid


def test_the_others_are_updated_by_lion_if_asked() -> None:
    """--muon-scalar-optimizer lion: a step moves each number by the learning rate, and keeps one moment."""
    _, optimizer = build(muon_scalar_optimizer="lion", weight_decay=0.0)
    scales = {p: p.detach().clone() for p, state in optimizer.state.items() if set(state) == {"exp_avg"}}
    assert len(scales) + 4 == len(optimizer.state)  # four matrices of a layer
    step(optimizer, 0)
    for parameter, before in scales.items():
        moved = (parameter.detach() - before)[parameter.main_grad != 0].abs()
        assert torch.allclose(moved, torch.full_like(moved, LR), rtol=0, atol=1e-12) and len(moved)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    ddp, optimizer = build(dtype=torch.float32)
    step(optimizer, 0)
    before = {name: value.clone() for name, value in optimizer.state_dict()["state"].items()}
    held = [p.detach().clone() for p in ddp.parameters()]
    optimizer.units[1].gradient_shard.fill_(float("nan"))
    assert not optimizer.step_on_device().update_applied
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(map(torch.equal, held, ddp.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_resumes_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    ddp, optimizer = build(dtype=dtype)
    step(optimizer, 0)
    save({"model": ddp.state_dict(), "optimizer": optimizer.sharded_state_dict()}, str(tmp_path))
    step(optimizer, 1)
    other_ddp, other = build(dtype=dtype)
    loaded = load({"model": other_ddp.state_dict(), "optimizer": other.sharded_state_dict()}, str(tmp_path))
    other_ddp.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    step(other, 1)
    pairs = zip(ddp.parameters(), other_ddp.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


# Layouts -------------------------------------------------------------------------------------------------------------

SHARDED = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
FULL = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
DISTRIBUTED = {"muon_tp_mode": "distributed"}
BLOCKWISE = {"muon_tp_mode": "blockwise"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sharded state": ({"ddp": SHARDED, "elements_at_once": 1000}, {}),
    "sharded weights, experts": ({"ddp": FULL, "model": EXPERTS}, {"model": EXPERTS}),
    "tensor parallel, by default": ({"grid": {"tensor": 2}}, {}),
    "tensor parallel, duplicated": ({"grid": {"tensor": 2}, "muon_tp_mode": "duplicated"}, {}),
    "tensor parallel, distributed": ({"grid": {"tensor": 2}, **DISTRIBUTED}, {}),
    "more ranks than groups": (
        {"grid": {"tensor": 2}, "model": {"num_query_groups": 1}, **DISTRIBUTED},
        {"model": {"num_query_groups": 1}},
    ),
    "expert tensor parallel": (
        {"grid": {"tensor": 2, "expert_tensor": 2}, "model": EXPERTS, **DISTRIBUTED},
        {"model": EXPERTS},
    ),
    "expert parallel": (
        {"grid": {"expert": 2}, "model": EXPERTS, "ddp": SHARDED},
        {"model": EXPERTS},
    ),
}


def trained_in_all(cases: list[dict[str, Any]]) -> list[dict[Any, float]]:
    return [trained(case) for case in cases]


def difference(ranks: list[dict[Any, float]], expected: dict[Any, float]) -> float:
    found: dict[Any, float] = {}
    for rank in ranks:
        found |= rank
    assert found.keys() == expected.keys()
    return max(abs(found[key] - expected[key]) for key in expected)


def test_no_layout_changes_the_answer() -> None:
    results = run_on_ranks(trained_in_all, 2, [case for case, _ in CASES.values()])
    for number, (name, (_, whole)) in enumerate(CASES.items()):
        assert difference([rank[number] for rank in results], trained(whole)) < 1e-11, name


def test_blockwise_depends_on_the_layout_and_a_shared_matrix_is_refused() -> None:
    blockwise, shared = run_on_ranks(blocks_and_refusal, 2)[0]
    expected = trained({})
    assert difference([blockwise], {key: expected[key] for key in blockwise}) > 1e-4
    assert "--muon-tp-mode distributed" in shared and "--muon-no-split-qkv" in shared


def blocks_and_refusal() -> tuple[dict[Any, float], str]:
    with pytest.raises(UserError) as caught:
        case = {"grid": {"tensor": 2}, "model": {"num_query_groups": 1}, "muon_split_qkv": False}
        build(**case, **DISTRIBUTED)
    return trained({"grid": {"tensor": 2}, **BLOCKWISE}), str(caught.value)


def test_products_have_the_chosen_precision_and_number_of_steps() -> None:
    """--muon-fp32-matmul-prec, --muon-num-ns-steps and --muon-no-split-qkv change what they say, in float32."""

    def qkv(**settings: Any) -> Tensor:
        ddp, optimizer = build(dtype=torch.float32, **settings)
        step(optimizer, 0)
        return next(p.detach() for p in ddp.parameters() if info_of(p).name.endswith("linear_qkv.weight"))

    exact = qkv(muon_fp32_matmul_prec="high")
    for settings in ({"muon_fp32_matmul_prec": "low"}, {}):
        assert 1e-5 < (qkv(**settings) - exact).abs().max() < 0.02
    assert (qkv(muon_fp32_matmul_prec="high", muon_num_ns_steps=1) - exact).abs().max() > 1e-3
    assert (qkv(muon_fp32_matmul_prec="high", muon_split_qkv=False) - exact).abs().max() > 1e-3


@pytest.mark.parametrize("model", [{}, EXPERTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_update_whole_matrices_where_they_are(
    dtype: torch.dtype, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that a GPU runs, in Triton's interpreter, give the weights of the formulas in float32 but for the
    rounding to float16. Momenta are those of the formulas."""

    def trained_here() -> tuple[Tensor, Tensor]:
        settings = {"bf16": True} if dtype is torch.bfloat16 else {}
        _, optimizer = build(dtype=dtype, model=model, muon_fp32_matmul_prec="high", **settings)
        for number in range(2):
            step(optimizer, number)
        made = [each.weights.decode() for each in optimizer.states]
        return torch.cat(made), torch.cat(
            [
                moments["momentum_buffer"].flatten()
                for moments in optimizer.state.values()
                if "momentum_buffer" in moments
            ]
        )

    expected, momenta = trained_here()
    monkeypatch.setattr(muon.Muon, "_in_float16", True)
    monkeypatch.setattr(muon, "_has_kernels", lambda segment: True)
    monkeypatch.setattr(muon_triton, "_PARTS", 4)
    found, averaged = trained_here()
    torch.testing.assert_close(averaged, momenta, rtol=1e-6, atol=1e-7)
    assert 0 < (found - expected).abs().max() < 5e-3
