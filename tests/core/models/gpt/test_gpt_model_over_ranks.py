"""GPT whose layers are split over tensor parallel ranks, against one rank, in float64: losses, logits, gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.boxes import error, fill, gradient_errors, part_of, whole_gradients, whole_values
from support.pool import Pool
from torch import nn

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.attention import groups_of_rank
from megatron.core.transformer.transformer_config import TransformerConfig

TOLERANCE = 1e-11
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "ffn_hidden_size": 24,
}
ALL_HEADS = {"qk_layernorm": True, "qk_norm_scope": "full"}
ROPE = {"position_embedding_type": "rope"}
UNTIED = {"share_embeddings_and_output_weights": False}

# name: (tensor parallel ranks, settings of the config, keywords of the model)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "biases, learned positions, tied": (2, {}, {}),
    "embedding not scattered": (2, {}, {"scatter_embedding_sequence_parallel": False}),
    "untied, padded vocabulary": (2, {}, {**UNTIED, "vocab_padding_multiple": 16}),
    "llama, GQA": (2, {**LLAMA, "num_query_groups": 2}, {**ROPE, **UNTIED}),
    "qk norms, learnable sinks": (
        2,
        {"qk_layernorm": True, "num_query_groups": 2, "softmax_type": "learnable"},
        {**ROPE},
    ),
    "MQA": (2, {"num_query_groups": 1, "qk_layernorm": True}, ROPE),
    "four ranks, two groups": (4, {"num_query_groups": 2, "qk_layernorm": True}, {**ROPE, **UNTIED}),
    "four ranks, MQA, no biases": (4, {**LLAMA, "num_query_groups": 1}, ROPE),
    "all heads normed together, norms behind": (
        2,
        {**LLAMA, "num_query_groups": 2, **ALL_HEADS, "norm_placement": "post", "clip_qkv": 0.9},
        ROPE,
    ),
    "four ranks, two groups, all heads normed together, a gate with biases": (
        4,
        {"num_query_groups": 2, "normalization": "RMSNorm", **ALL_HEADS, "attention_output_gate": True},
        ROPE,
    ),
    "a gate, norms on both sides, factors": (
        2,
        {
            **LLAMA,
            "attention_output_gate": True,
            "norm_placement": "sandwich",
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "logit_scale": 1.3,
            "attention_output_bias": True,
            "mlp_bias": True,
        },
        {**ROPE, **UNTIED},
    ),
    "side by side, bounded, ALiBi": (
        2,
        {
            "norm_placement": "parallel",
            "norm_bias": False,
            "attn_logit_softcapping": 1.1,
            "final_logit_softcapping": 0.8,
            "alibi": True,
        },
        {"position_embedding_type": "none", "vocab_padding_multiple": 16},
    ),
    "side by side with two norms, chunks, queries that grow": (
        2,
        {
            "norm_placement": "parallel_two_norms",
            "qk_l2_norm": True,
            "attention_chunk_size": 5,
            "no_rope_freq": 2,
            "nope_temperature_scale": 0.7,
            "nope_temperature_floor": 3,
        },
        ROPE,
    ),
    "Mamba-2": (
        2,
        {"hybrid_layer_pattern": "MM", "mamba_head_dim": 4, "mamba_num_groups": 4, "mamba_state_dim": 3},
        {"position_embedding_type": "none"},
    ),
    "no weights in norms": (2, {**LLAMA, "normalization": "LayerNorm", "norm_affine": False}, ROPE),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def build(
    settings: dict, model: dict, groups: ProcessGroupCollection | None = None, norm: type | None = None, **layout: Any
) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        hidden_dropout=0.2,
        attention_dropout=0.2,
        fp64=True,
        **settings,
        **layout,
    )
    keywords = {"vocab_size": 37, "max_sequence_length": 16, "share_embeddings_and_output_weights": True} | model
    spec = gpt_layer_spec_of(config, 1)
    if norm is not None:
        parts = spec.submodules
        attention = parts.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = attention.q_layernorm = attention.k_layernorm = norm
    return GPTModel(config, spec, pg_collection=groups, **keywords)


def batch(s: int = 12, b: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(37, (b, s + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 3] = -100
    return ids[:, :-1], labels, torch.rand(b, s, dtype=torch.float64, generator=generator)


def run(model: GPTModel) -> torch.Tensor:
    """Losses, with gradients of their weighted sum left in the model; dropout as at one place of a run."""
    ids, labels, weight = batch()
    tokens = Tokens(ids.shape[1], ids.shape[0], random=RngPosition(7, 3, 5))
    loss = model(ids, labels=labels, tokens=tokens)
    (loss * weight).sum().backward()
    return loss.detach()


def on_a_rank(
    settings: dict, keywords: dict, size: int, sequence_parallel: bool, expected: dict, norm: type | None = None
) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(size, tensor=size), rank)
    layout = {"tensor_model_parallel_size": size, "sequence_parallel": sequence_parallel}
    model = build(settings, keywords, groups, norm, **layout)
    for parameter in model.parameters():
        initial = parameter.detach().view(-1)[: parameter.info.box.numel]
        assert torch.equal(initial, part_of(expected["initial"][parameter.info.name], parameter).reshape(-1))
    errors = {}
    fill(model, expected["values"])
    errors["loss"] = error(run(model), expected["loss"])
    errors |= gradient_errors(model, expected["gradients"], groups.tp)
    model.eval()
    logits = model(batch()[0], runtime_gather_output=True)
    errors["logits"] = error(logits.detach(), expected["logits"])
    own = model(batch()[0])  # this rank's part of the vocabulary, and padding
    wanted = expected["logits"][..., own.shape[-1] * rank :][..., : own.shape[-1]]
    errors["own logits"] = error(own[..., : wanted.shape[-1]].detach(), wanted)
    assert (own[..., wanted.shape[-1] :] == -torch.inf).all()
    own[..., : wanted.shape[-1]].sum().backward()
    return errors


def prepared(settings: dict, keywords: dict, norm: type | None = None) -> dict[str, Any]:
    """What one rank has and computes."""
    torch.manual_seed(0)
    whole = build(settings, keywords, norm=norm)
    expected: dict[str, Any] = {"initial": whole_values(whole)}
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    expected |= {"values": whole_values(whole), "loss": run(whole), "gradients": whole_gradients(whole)}
    whole.eval()
    return expected | {"logits": whole(batch()[0]).detach()}


def compare(
    pool: Pool, size: int, settings: dict, keywords: dict, sequence_parallel: bool, norm: type | None = None
) -> None:
    expected = prepared(settings, keywords, norm)
    results = pool.run(on_a_rank, size, settings, keywords, size, sequence_parallel, expected, norm)
    for rank, errors in enumerate(results):
        wrong = {name: value for name, value in errors.items() if not value < TOLERANCE}
        assert len(errors) > 10 and not wrong, (rank, wrong)


@pytest.mark.slow_cases(
    "four ranks, two groups, all heads normed together, a gate with biases-True",
    "side by side with two norms, chunks, queries that grow-False",
)
@pytest.mark.parametrize(
    ("case", "sequence_parallel"),
    [
        # Cases take turns; parity cells have models of all kinds with tp2 and sp2.
        pytest.param(case, sequence_parallel, marks=[pytest.mark.slow] * ((number + sequence_parallel) % 2))
        for number, case in enumerate(CASES)
        for sequence_parallel in (False, True)
    ],
)
def test_equals_one_rank(case: str, sequence_parallel: bool, pool: Pool) -> None:
    size, settings, keywords = CASES[case]
    compare(pool, size, settings, keywords, sequence_parallel)


class OwnNorm(nn.LayerNorm):
    """A norm of a user, who knows nothing of descriptors."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)


def test_norms_of_a_user_are_summed_too(pool: Pool) -> None:
    size, settings, keywords = CASES["qk norms, learnable sinks"]
    for sequence_parallel in (False, True):
        compare(pool, size, settings, keywords, sequence_parallel, OwnNorm)


def without_processes(settings: dict, **model: Any) -> GPTModel:
    """Rank 1 of 2, which cannot communicate."""
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    return build(settings, model, ProcessGroupCollection.from_grid(RankGrid(2, tensor=2), 1), **layout)


def test_refusals_name_what_works() -> None:
    model = without_processes({})
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(UserError, match=r"tokens in a row: 5 is not divisible by 2 tensor parallel ranks; use 4 or 6"):
        model(ids)
    with pytest.raises(UserError, match=r"sequence_parallel does not go with an inference_context"):
        model(ids, inference_context=object())
    groups = ProcessGroupCollection.from_grid(RankGrid(3, tensor=3), 1)
    with pytest.raises(
        UserError, match=r"num_attention_heads: 4 is not divisible by 3 tensor parallel ranks; use 3 or 6"
    ):
        build({}, {}, groups)
    groups = ProcessGroupCollection.from_grid(RankGrid(4, tensor=4), 1)
    with pytest.raises(UserError, match=r"num_query_groups 6 and 4 .*: one has to divide the other; .* works is 4"):
        groups_of_rank(6, groups.tp)
