"""A T5 writes what transformers' own T5 writes."""

import pytest
import torch
from support.t5_against_transformers import InFloat64, ours, theirs

from megatron.core.exceptions import UserError
from megatron.core.inference.encoder_decoder_generation import generate_from_encoder
from megatron.core.inference.sampling import GREEDY, SamplingParams
from megatron.core.inference.static_context import InferenceParams, StaticInferenceContext
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

PROMPTS = [[5, 9, 33, 2], [7], [60, 41, 12, 12, 3, 8, 20]]


@torch.no_grad()
def test_greedy_and_sampled_tokens() -> None:
    oracle = theirs(feed_forward_proj="gated-gelu", tie_word_embeddings=False)  # a tied one repeats its first token
    model = ours(oracle, False)
    expected = []
    with InFloat64():
        for prompt in PROMPTS:
            ids = [0]
            for _ in range(7):
                logits = oracle(torch.tensor([prompt]), decoder_input_ids=torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
            expected.append(ids[1:])
    found = generate_from_encoder(model, PROMPTS, 0, 7, GREEDY)
    assert found == expected and len({tuple(row) for row in found}) > 1
    end = expected[0][3]
    stopped = generate_from_encoder(model, PROMPTS, 0, 7, GREEDY, ends=[end])
    assert stopped == [row[: row.index(end)] if end in row else row for row in expected]
    sampling = SamplingParams(temperature=2.0, seed=4)
    together = generate_from_encoder(model, PROMPTS, 0, 7, sampling)
    alone = [generate_from_encoder(model, [p], 0, 7, sampling, first_sequence=i)[0] for i, p in enumerate(PROMPTS)]
    assert together == alone and together != expected
    with pytest.raises(UserError, match="a prompt has no tokens"):
        generate_from_encoder(model, [[3], []], 0, 7, GREEDY)


@torch.no_grad()
@pytest.mark.parametrize("positions", ["relative", "rope", "learned_absolute"])
def test_a_cache_changes_no_logits(positions: str) -> None:
    """The decoder's tokens one by one, with their keys and values kept, against all at once. Keys and values of the
    encoder's output are computed once."""
    torch.manual_seed(3)
    model = small_t5(positions).eval()
    read, wrote = torch.randint(40, (2, 5)), torch.randint(40, (2, 6))
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])[:, None, None]
    encoded = model(read, wrote, encoder_attn_mask=hidden, output_encoder_hidden_only=True)
    fixed = {"encoder_decoder_attn_mask": hidden, "encoder_hidden_states": encoded}
    expected = model(read, wrote, **fixed)
    projected: list[int] = []
    assert model.decoder is not None
    for layer in model.decoder.layers:
        layer.cross_attention.linear_kv.register_forward_hook(lambda *_: projected.append(1))
    context = StaticInferenceContext(2, 6)
    context.begin(torch.tensor([2, 2]), 2)
    found = [model(read, wrote[:, :2], **fixed, inference_context=context)]
    for place in range(2, 6):
        context.advance()
        found.append(model(read, wrote[:, place : place + 1], **fixed, inference_context=context))
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-12)
    assert len(projected) == 2
    params, found = InferenceParams(2, 6), []
    for start, end in ((0, 2), (2, 5), (5, 6)):
        found.append(model(read, wrote[:, start:end], **fixed, inference_params=params))
        params.sequence_len_offset = end
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-12)
    assert len(projected) == 4
    with pytest.raises(UserError, match="the context is full"):
        context.advance()


def small_t5(positions: str) -> T5Model:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, fp64=True, init_method_std=0.3)
    specs = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(2)
    return T5Model(config, config, *specs, 40, 8, position_embedding_type=positions)  # type: ignore[arg-type]
