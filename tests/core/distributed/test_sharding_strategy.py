"""Every strategy of data parallel units trains the model that one process trains, step by step."""

from typing import Any

import pytest
import torch
from support.pool import Pool
from support.sharding import STRATEGIES, SlicesByName, backward, groups_of, joined, slices, small_model, wrap
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.exceptions import UserError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import ExternalOptimizer, OptimizerConfig
from megatron.core.parameters import info_of
from megatron.core.transformer.transformer_config import TransformerConfig

STEPS = 3
SHARDED = [name for name in STRATEGIES if name != "no_shard"]

Trained = dict[str, Any]


def train(
    ranks: int,
    settings: dict[str, Any],
    instances: int = 1,
    micro_batches: int = 2,
    dtype: torch.dtype = torch.float64,
    per_token: bool = False,
) -> list[Trained]:
    """Norm, and this rank's gradients and weights, of each step."""
    groups = groups_of(ranks, instances)
    ddp, optimizer = wrap(small_model(dtype, per_token), groups, instances, **settings)
    seen = []
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        tokens = backward(ddp, step, micro_batches, per_token)
        finalize_model_grads([ddp], tokens if per_token else None)
        gradients = slices(ddp.gradient_chunks())
        norm = optimizer.step_on_device().grad_norm
        seen.append({"norm": float(norm), "gradients": gradients, "weights": slices(ddp.weight_chunks())})
    groups.close()
    return seen


def error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    worst = 0.0
    for name, flat in got.items():
        assert torch.isfinite(flat).all(), name  # the largest of several errors would pass over a NaN
        exact = expected[name].flatten()[: flat.numel()].double()
        worst = max(worst, ((flat - exact).norm() / exact.norm()).item())
    return worst


def check(ranks: list[list[Trained]], expected: list[Trained], tolerance: float) -> None:
    for step, exact in enumerate(expected):
        assert len({rank[step]["norm"] for rank in ranks}) == 1
        assert ranks[0][step]["norm"] == pytest.approx(exact["norm"], rel=tolerance)
        for kind in ("gradients", "weights"):
            assert error(joined([rank[step][kind] for rank in ranks]), exact[kind]) < tolerance, (step, kind)


@pytest.mark.fast(
    "optim-dtype0",
    "optim_grads-dtype1",
    "optim_grads_params-dtype1",
    "optim, plain-dtype1",
    "optim_grads, plain-dtype0",
    "optim_grads_params, plain-dtype0",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHARDED)
def test_narrower_models_are_the_replicated_ones_but_for_the_order_of_sums(
    pool: Pool, name: str, dtype: torch.dtype
) -> None:
    replicated = pool.run(train, 2, 2, STRATEGIES["no_shard"], 1, 2, dtype)
    ranks = pool.run(train, 2, 2, STRATEGIES[name], 1, 2, dtype)
    expected = [{"norm": s["norm"], **{k: joined([s[k]]) for k in ("gradients", "weights")}} for s in replicated[0]]
    # A bfloat16 weight may be rounded the other way where its master differs in the last bit.
    check(ranks, expected[:1], 1e-5 if dtype is torch.float32 else 4e-3)
    check(ranks, expected, 1e-4 if dtype is torch.float32 else 2e-2)


def all_ones(ranks: int, settings: dict[str, Any], instances: int) -> tuple[float, float]:
    groups = groups_of(ranks, instances)
    ddp, optimizer = wrap(small_model(), groups, instances, **settings)
    for chunk in ddp.gradient_chunks():
        chunk.tensor.fill_(1.0)
        if chunk.name == "embedding.table" and chunk.range[0] == 0:
            chunk.tensor[0] = 0.0
    norm, zeros = float(optimizer.get_grad_norm()), float(optimizer.count_zeros())
    groups.close()
    return norm, zeros


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_element_counts_once(pool: Pool, name: str, instances: int) -> None:
    instances = 1 if name == "no_shard" else instances
    model = small_model()
    elements = sum(info_of(parameter).box.numel for parameter in model.parameters())
    for norm, zeros in pool.run(all_ones, 4, 4, STRATEGIES[name], instances):
        assert norm == pytest.approx((elements - 1) ** 0.5, rel=1e-14)
        assert zeros == 1


def external(ranks: int) -> str:
    groups = groups_of(ranks)
    ddp, _ = wrap(small_model(), groups, **STRATEGIES["optim"])
    with pytest.raises(UserError) as caught:
        ExternalOptimizer(OptimizerConfig(lr=0.1), torch.optim.SGD(ddp.parameters(), lr=0.1), [ddp])
    return str(caught.value)


def test_a_scripts_own_optimizer_needs_whole_weights(pool: Pool) -> None:
    for text in pool.run(external, 2, 2):
        assert "SGD updates whole weights" in text and "--use-distributed-optimizer" in text


def test_instances_must_fit() -> None:
    with pytest.raises(UserError, match="num_distributed_optimizer_instances 2, but the process groups cut 1"):
        wrap(small_model(), groups_of(1), instances=2, **STRATEGIES["optim"])
    with pytest.raises(UserError, match="num_distributed_optimizer_instances 2: nothing is sharded"):
        wrap(small_model(), groups_of(1), instances=2, **STRATEGIES["no_shard"])


def built(dtype: torch.dtype, name: str, on_meta: bool) -> tuple[SlicesByName, int, int]:
    """Weights of a GPT that was built with or without memory, and the most whole units that had memory at a time."""
    groups = groups_of(2)
    config = TransformerConfig(
        num_layers=3, hidden_size=16, num_attention_heads=4, params_dtype=dtype, bf16=dtype is torch.bfloat16, seed=7
    )
    with torch.device("meta" if on_meta else "cpu"):
        model = GPTModel(config, get_gpt_layer_local_spec(), 50, 12, pg_collection=groups)
    ddp_config = DistributedDataParallelConfig(**STRATEGIES[name])
    device = torch.device("cpu")
    ddp = DistributedDataParallel(config, ddp_config, model, pg_collection=groups, device=device)
    found = slices(ddp.weight_chunks()), len(ddp.units), sum(unit.has_whole_weights for unit in ddp.units)
    torch.distributed.barrier(groups.dp)  # the other rank may still be connecting to this one
    groups.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["no_shard", "optim_grads_params"])
def test_a_model_that_was_built_without_memory_has_the_same_values(pool: Pool, name: str, dtype: torch.dtype) -> None:
    answers = [pool.run(built, 2, dtype, name, on_meta) for on_meta in (False, True)]
    plain, other = (joined([found for found, _, _ in answer]) for answer in answers)
    assert plain.keys() == other.keys() and len(plain) > 20
    for weight in plain:
        assert torch.equal(plain[weight], other[weight]), weight
    assert {(units, whole) for _, units, whole in answers[1]} == {(6, 0 if name == "optim_grads_params" else 6)}
