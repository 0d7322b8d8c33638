"""Continuing prompts with a cache equals computing everything again; rows do not depend on each other."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.inference.generation import generate
from megatron.core.inference.sampling import GREEDY, SamplingParams
from megatron.core.inference.static_context import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

PROMPTS = [[3, 7, 1], [5], [9, 2, 8, 30, 11, 4], [6, 6]]
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 3,
}
MODELS = {
    "learned": ({}, {}),
    "rope, grouped": ({"num_query_groups": 2}, {"position_embedding_type": "rope"}),
    "window": ({"window_size": (3, 0)}, {"position_embedding_type": "rope"}),
    "sink": ({"softmax_type": "learnable"}, {"position_embedding_type": "none"}),
    "chunks, no positions in every other layer": (
        {
            "attention_chunk_size": 4,
            "attention_chunk_skip_freq": 2,
            "no_rope_freq": 2,
            "qk_l2_norm": True,
            "nope_temperature_scale": 0.5,
            "nope_temperature_floor": 3,
        },
        {"position_embedding_type": "rope"},
    ),
    "ALiBi, bounded, a gate": (
        {"alibi": True, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention_output_gate": True},
        {"position_embedding_type": "none"},
    ),
    "a base for windows": (
        {"window_size": (3, 0), "window_attn_skip_freq": 2, "rotary_base_local": 10.0, "norm_placement": "parallel"},
        {"position_embedding_type": "rope"},
    ),
    "gated delta nets": (
        {**DELTA, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 3},
        {"position_embedding_type": "rope"},
    ),
    "hybrid": (
        {**DELTA, "hybrid_layer_pattern": "MG*", "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 3},
        {"position_embedding_type": "none"},
    ),
}


def build(settings: dict, model: dict) -> GPTModel:
    config = TransformerConfig(num_layers=3, hidden_size=16, num_attention_heads=4, fp64=True, **settings)
    gpt = GPTModel(config, get_gpt_decoder_block_spec(config, False), vocab_size=37, max_sequence_length=24, **model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in gpt.parameters():
            scale = 1.5 if parameter.dim() > 1 else 0.2  # so that what is written depends on all that was read
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
            if parameter.info.name.endswith("layernorm.weight"):
                parameter.add_(1.0)
    return gpt.eval()


def again_and_again(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    """Greedy, without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_cache_equals_full_computation(name: str) -> None:
    model = build(*MODELS[name])
    expected = [again_and_again(model, prompt, 9) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) > 2  # rows that agree by having nothing to say would prove little
    assert generate(model, PROMPTS, 9, GREEDY) == expected


@pytest.mark.parametrize("name", MODELS)
def test_logits_with_a_cache(name: str) -> None:
    model = build(*MODELS[name])
    ids = torch.randint(37, (2, 12), generator=torch.Generator().manual_seed(1))
    whole = model(ids)
    lengths = torch.tensor([5, 3])
    context = StaticInferenceContext(2, 12)
    logits = model(ids[:, :5], context.begin(lengths, 5).expand(2, -1), inference_context=context)
    close(logits[:, 0], whole[torch.arange(2), lengths - 1])
    for step in range(7):
        at = lengths + step
        logits = model(ids[torch.arange(2), at][:, None], context.advance(), inference_context=context)
        close(logits[:, 0], whole[torch.arange(2), at])


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert (ours - expected).abs().max() < 1e-11 * expected.abs().max()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.7, top_k=9), SamplingParams(1.5, top_p=0.8, seed=7)])
def test_a_batch_equals_its_rows(sampling: SamplingParams) -> None:
    model = build({}, {})
    together = generate(model, PROMPTS, 9, sampling)
    alone = [generate(model, [p], 9, sampling, first_sequence=number)[0] for number, p in enumerate(PROMPTS)]
    assert together == alone


def test_draws_depend_on_the_seed_and_the_sequence() -> None:
    model = build({}, {})
    runs = [generate(model, [[3]] * 3, 9, SamplingParams(seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(row) for row in runs[0]}) == 3


def test_a_row_stops_at_the_end_token() -> None:
    model = build({}, {})
    free = generate(model, PROMPTS, 9, GREEDY)
    end = free[0][4]
    stopped = generate(model, PROMPTS, 9, GREEDY, end=end)
    for row, whole in zip(stopped, free, strict=True):
        assert row == (whole[: whole.index(end)] if end in whole else whole)
    assert len(stopped[0]) <= 4


def test_what_does_not_fit_is_refused() -> None:
    model = build({}, {})
    with pytest.raises(UserError, match="has no tokens"):
        generate(model, [[1], []], 3, GREEDY)
    context = StaticInferenceContext(1, 2)
    with pytest.raises(UserError, match=r"1 prompts of up to 3 tokens do not fit into a context of 1 x 2"):
        context.begin(torch.tensor([3]), 3)
    context.begin(torch.tensor([2]), 2)
    with pytest.raises(UserError, match="context is full: max_sequence_length 2"):
        context.advance()


def test_frequencies_that_depend_on_the_row_want_rows_that_stay_short() -> None:
    scaling = {"rope_scaling_type": "dynamic", "rope_scaling_original_length": 12}
    model = build(scaling, {"position_embedding_type": "rope"})
    assert generate(model, PROMPTS, 6, GREEDY) == [again_and_again(model, prompt, 6) for prompt in PROMPTS]
    with pytest.raises(UserError, match=r"context of 13 tokens is longer than 12 \(rope_scaling_original_length\)"):
        generate(model, PROMPTS, 7, GREEDY)
