"""Recompute of layers of experts and of layers that predict further ahead: no bit changes, nothing is counted twice."""

from typing import Any

import pytest
import torch
from support.exact_gradients import ROWS, UNIFORM, assert_equal, kept_by, loss_of, recomputing
from support.processes import run_on_ranks
from support.tiny_models import tiny_config, tiny_gpt
from torch import Tensor

from megatron.core.communication.traffic import recorded
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.layer_metrics import take_layer_metrics
from megatron.core.transformer.moe.router import TopKRouter
from megatron.facades import parallel_state

LENGTH, WIDTH, FFN, TOPK = 32, 64, 128, 2
TOKENS = LENGTH * ROWS

WAYS: dict[str, dict[str, Any]] = {
    "uniform": UNIFORM,
    "block of 3": UNIFORM | {"recompute_method": "block", "recompute_num_layers": 3},
    "moe": recomputing("moe"),
    "moe_layer_recompute": {"moe_layer_recompute": True},
    "moe_act": recomputing("moe_act"),
    "shared_experts": recomputing("shared_experts"),
    "moe_act, shared_experts, layernorm": recomputing("moe_act", "shared_experts", "layernorm"),
    "all": recomputing("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"),
}
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"moe_grouped_gemm": True, "gated_linear_unit": True, "add_bias_linear": False},
    "sequential, dropped": {"moe_expert_capacity_factor": 0.6},
}


def build(**settings: Any) -> GPTModel:
    config = tiny_config(
        **{
            "hidden_size": WIDTH,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "mtp_num_layers": 1,
            "num_moe_experts": 4,
            "moe_router_topk": TOPK,
            "moe_layer_freq": [0, 1],
            "moe_ffn_hidden_size": FFN,
            "moe_shared_expert_intermediate_size": FFN,
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
            "moe_z_loss_coeff": 0.01,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_input_jitter_eps": 0.1,
            **settings,
        }
    )
    return tiny_gpt(config, 50, LENGTH)


def outcome(model: GPTModel) -> dict[str, Tensor]:
    """Gradients, reports and counts after two micro-batches, the first of which goes back when both went forward."""
    first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()
    second.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {
        f"{r.name} of {r.layer}": torch.stack([r.total.sum(), r.count.sum()]) for r in take_layer_metrics([model])
    }
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    return found | {f"tokens {n}": router.take_tokens_per_expert() for n, router in enumerate(routers)}


@pytest.mark.fast("grouped")
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes(kind: str) -> None:
    plain = outcome(build(**KINDS[kind]))
    assert sum("tokens" in name for name in plain) == 2 and "mtp_1 loss of 3" in plain
    for way in WAYS.values():
        assert_equal(outcome(build(**KINDS[kind], **way)), plain)


def test_memory_that_is_kept() -> None:
    """In hidden states of all tokens [t, h], each of two layers of experts saves what the way's name promises."""
    settings = {"mtp_num_layers": None, "moe_layer_freq": 1, "moe_grouped_gemm": True, "normalization": "RMSNorm"}
    settings |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    settings |= {"add_bias_linear": False}
    hidden = TOKENS * WIDTH * 8
    nothing = kept_by(build(**settings))
    ways = {"moe": WAYS["moe"], "moe_act": WAYS["moe_act"], "shared_experts": WAYS["shared_experts"]}
    saved = {way: (nothing - kept_by(build(**settings, **how))) / 2 / hidden for way, how in ways.items()}
    wide = TOPK * FFN / WIDTH  # rows of experts between their products, in hidden states
    assert saved["moe_act"] == pytest.approx(2 * wide, abs=0.3)  # activated, and times the weight
    assert saved["shared_experts"] == pytest.approx(2 * FFN / WIDTH, abs=0.3)  # product and activation
    assert saved["moe"] > saved["moe_act"] + saved["shared_experts"] + wide  # first products and rows too


@pytest.mark.slow
def test_full_recompute_counts_predicting_layers_after_the_decoders() -> None:
    """The model has two layers and one that predicts further ahead."""

    def kept(method: str, num_layers: int) -> int:
        how = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": num_layers}
        return kept_by(build(num_moe_experts=None, **how))

    one, two, three, each = kept("block", 1), kept("block", 2), kept("block", 3), kept("uniform", 1)
    layer = one - two
    assert layer > 5 * TOKENS * WIDTH * 8
    assert two - three > 0.9 * layer  # the third is the predicting one, with its norms and projection
    assert three == pytest.approx(each, abs=0.05 * layer)


# ---------------------------------------------------------------------------------------------------------------------
# Experts on other ranks


def _over_ranks(dispatcher: str, overlaps: bool) -> list[tuple[int, int]]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    settings: dict[str, Any] = {
        "expert_model_parallel_size": 2,
        "moe_token_dispatcher_type": dispatcher,
        "moe_shared_expert_overlap": overlaps,
        **KINDS["grouped"],
    }
    plain = outcome(build(**settings))
    for way in ("uniform", "moe", "moe_act, shared_experts, layernorm"):
        if not (overlaps and "shared" in way):
            assert_equal(outcome(build(**settings, **WAYS[way])), plain)
    exchanges = []
    for how in ({}, WAYS["moe"]):
        model = build(**settings, **how)
        with recorded() as log:
            loss_of(model).backward()
        integers = sum(not entry.dtype.is_floating_point and entry.operation == "all_gather" for entry in log)
        exchanges.append((integers, len(log)))
    parallel_state.destroy_model_parallel()
    return exchanges


@pytest.mark.fast("alltoall-True")
@pytest.mark.parametrize(
    ("dispatcher", "overlaps"),
    [
        pytest.param("alltoall", False, marks=pytest.mark.slow),  # with overlap it does the same in two halves
        ("alltoall", True),
        ("allgather", False),
        ("flex", False),
    ],
)
def test_no_bit_changes_where_tokens_travel(dispatcher: str, overlaps: bool) -> None:
    for once_only, again in run_on_ranks(_over_ranks, 2, dispatcher, overlaps):
        assert again[1] > once_only[1]  # tokens travel once more
        assert again[0] == once_only[0] > 0  # counts, or the numbers of experts, do not
