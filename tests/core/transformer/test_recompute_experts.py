"""Recompute of layers of experts and of layers that predict further ahead: no bit changes, nothing is counted twice."""

from typing import Any

import pytest
import torch
from support.kept_memory import kept_bytes
from support.processes import run_on_ranks
from torch import Tensor

from megatron.core.communication.traffic import recorded
from megatron.core.exceptions import UserError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.layer_metrics import take_layer_metrics
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.facades import parallel_state

LENGTH, ROWS, WIDTH, FFN, TOPK = 32, 2, 64, 128, 2
TOKENS = LENGTH * ROWS

FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}


def parts(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


WAYS: dict[str, dict[str, Any]] = {
    "uniform": FULL | {"recompute_method": "uniform"},
    "block of 3": FULL | {"recompute_method": "block", "recompute_num_layers": 3},
    "moe": parts("moe"),
    "moe_layer_recompute": {"moe_layer_recompute": True},
    "moe_act": parts("moe_act"),
    "shared_experts": parts("shared_experts"),
    "moe_act, shared_experts, layernorm": parts("moe_act", "shared_experts", "layernorm"),
    "all": parts("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"),
}
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"moe_grouped_gemm": True, "gated_linear_unit": True, "add_bias_linear": False},
    "sequential, dropped": {"moe_expert_capacity_factor": 0.6},
}


def build(**settings: Any) -> GPTModel:
    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": WIDTH,
            "num_attention_heads": 4,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "fp64": True,
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
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(config, spec, 50, LENGTH, mtp_block_spec=further)


def loss_of(model: GPTModel, micro_batch: int = 0) -> Tensor:
    ids = torch.randint(50, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3 + micro_batch))
    tokens = Tokens(LENGTH, ROWS, random=RngPosition(seed=7, iteration=4, first_sample=6 + micro_batch))
    return model(ids[:, :-1], labels=ids[:, 1:].contiguous(), tokens=tokens).sum()


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


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differing, differing
    assert all(value.abs().sum() > 0 for value in one.values())


@pytest.mark.fast("grouped")
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes(kind: str) -> None:
    plain = outcome(build(**KINDS[kind]))
    assert sum("tokens" in name for name in plain) == 2 and "mtp_1 loss of 3" in plain
    for way in WAYS.values():
        assert_equal(outcome(build(**KINDS[kind], **way)), plain)


def kept_by(**settings: Any) -> int:
    model = build(**settings)
    return kept_bytes(lambda: loss_of(model))


def test_memory_that_is_kept() -> None:
    """In hidden states of all tokens [t, h], each of two layers of experts saves what the way's name promises."""
    settings = {"mtp_num_layers": None, "moe_layer_freq": 1, "moe_grouped_gemm": True, "normalization": "RMSNorm"}
    settings |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    settings |= {"add_bias_linear": False}
    hidden = TOKENS * WIDTH * 8
    nothing = kept_by(**settings)
    ways = {"moe": WAYS["moe"], "moe_act": WAYS["moe_act"], "shared_experts": WAYS["shared_experts"]}
    saved = {way: (nothing - kept_by(**settings, **how)) / 2 / hidden for way, how in ways.items()}
    wide = TOPK * FFN / WIDTH  # rows of experts between their products, in hidden states
    assert saved["moe_act"] == pytest.approx(2 * wide, abs=0.3)  # activated, and times the weight
    assert saved["shared_experts"] == pytest.approx(2 * FFN / WIDTH, abs=0.3)  # product and activation
    assert saved["moe"] > saved["moe_act"] + saved["shared_experts"] + wide  # first products and rows too


@pytest.mark.slow
def test_full_recompute_counts_predicting_layers_after_the_decoders() -> None:
    """The model has two layers and one that predicts further ahead."""

    def kept(method: str, num_layers: int) -> int:
        how = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": num_layers}
        return kept_by(num_moe_experts=None, **how)

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


# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            parts("mlp") | {"moe_layer_freq": 1},
            "mlp is a part of a layer without experts, and there is no",
        ),
        (
            parts("shared_experts") | {"moe_shared_expert_overlap": True},
            "run in two halves with moe_shared_expe",
        ),
        (
            parts("shared_experts") | {"moe_shared_expert_intermediate_size": None},
            "shared_experts need moe_shared_expe",
        ),
        (
            parts("moe") | {"num_moe_experts": None},
            "moe is a part of a layer of experts, and num_moe_exp",
        ),
        (WAYS["uniform"] | {"moe_layer_recompute": True}, "full recomputes layers of experts too; drop one"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(**settings)
