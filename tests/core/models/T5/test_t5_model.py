"""T5 of one rank: logits of transformers' models, names of its state, what it refuses."""

import copy
from typing import Any

import pytest
import torch
from support.t5_against_transformers import InFloat64, ours, theirs
from support.tiny_models import tiny_config

from megatron.core.exceptions import UserError
from megatron.core.inference.static_context import StaticInferenceContext
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

T5 = {"feed_forward_proj": "relu", "tie_word_embeddings": True}
T5_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def texts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two rows of ids: the encoder's, with padding, which the mask is 0 for; and the decoder's."""
    generator = torch.Generator().manual_seed(4)
    encoder, decoder = (torch.randint(1, 67, (2, length), generator=generator) for length in (23, 17))
    mask = torch.ones(2, 23, dtype=torch.int64)
    mask[1, 15:] = 0
    return encoder, decoder, mask


@pytest.mark.parametrize("settings", [T5, T5_1_1], ids=["t5", "t5-1.1"])
def test_logits_and_gradients_are_those_of_transformers(settings: dict[str, Any]) -> None:
    their = theirs(**settings)
    tied = settings["tie_word_embeddings"]
    our = ours(their, tied)
    encoder, decoder, mask = texts()
    with InFloat64():
        expected = their(input_ids=encoder, attention_mask=mask, decoder_input_ids=decoder).logits
    hidden = mask.eq(0)[:, None, None]
    logits = our(encoder, decoder, hidden, None, hidden)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
    weight = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    parameters = dict(their.named_parameters())
    for stack in ("encoder", "decoder"):
        path = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        mine = getattr(our, f"{stack}_relative_pos_emb").relative_attention_bias.weight
        torch.testing.assert_close(mine.grad, parameters[path].grad, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        our.embedding.word_embeddings.weight.grad, parameters["shared.weight"].grad, rtol=1e-9, atol=1e-10
    )


def config(**settings: Any) -> TransformerConfig:
    return tiny_config(num_layers=1, **settings)


def t5(encoder_layers: int = 2, made_of: TransformerConfig | None = None, **options: Any) -> T5Model:
    decoder = made_of or config()
    encoder = copy.deepcopy(decoder)
    encoder.num_layers = encoder_layers
    specs = get_t5_encoder_with_local_block_spec(encoder_layers), get_t5_decoder_with_local_block_spec(1)
    return T5Model(decoder, encoder, *specs, 37, 12, **options)


class ScriptConfig(TransformerConfig):
    """A script's own config, with another constructor and an attribute that is no field."""

    def __init__(self, scale: float) -> None:
        super().__init__(**vars(config()))
        self.script_scale = scale


def test_layers_keep_a_script_s_config() -> None:
    model = t5(made_of=ScriptConfig(0.5))
    for stack in (model.encoder, model.decoder):
        assert stack is not None
        assert stack.layers[0].config.script_scale == 0.5


def test_names_are_those_of_megatron_lm() -> None:
    tied = t5(share_embeddings_and_output_weights=True).state_dict()
    assert "lm_head.output_layer.bias" in tied and "lm_head.output_layer.weight" not in tied
    untied = t5(position_embedding_type="relative").state_dict()
    assert "lm_head.output_layer.weight" in untied and "lm_head.output_layer.bias" not in untied
    assert tuple(untied["encoder_relative_pos_emb.relative_attention_bias.weight"].shape) == (32, 4)
    assert {name for name in tied if name.startswith("decoder.layers.0.") and "cross" in name} == {
        f"decoder.layers.0.{part}.{kind}"
        for part in (
            "pre_cross_attn_layernorm",
            *(f"cross_attention.{linear}" for linear in ("linear_q", "linear_kv", "linear_proj")),
        )
        for kind in ("weight", "bias")
    }
    assert {int(name.split(".")[2]) for name in tied if name.startswith("encoder.layers")} == {0, 1}


def ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(37, (2, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("positions", ["learned_absolute", "rope", "relative"])
def test_padding_changes_nothing_but_itself(positions: Any) -> None:
    model = t5(position_embedding_type=positions)
    text, written = ids(8, 0), ids(5, 1)
    padded = torch.cat([text, torch.zeros(2, 3, dtype=torch.int64)], 1)
    hidden = torch.arange(11)[None, None, None] >= 8
    torch.testing.assert_close(
        model(padded, written, hidden, None, hidden), model(text, written), rtol=1e-11, atol=1e-12
    )


def test_losses_are_the_cross_entropy_of_the_logits() -> None:
    model = t5(share_embeddings_and_output_weights=True)
    with torch.no_grad():
        model.lm_head.output_layer.bias.normal_()
    logits = model(ids(8, 0), ids(5, 1))
    losses = model(ids(8, 0), ids(5, 1), lm_labels=ids(5, 2))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids(5, 2).flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected, rtol=1e-12, atol=1e-12)


def test_the_encoder_alone_and_its_output_given() -> None:
    model = t5()
    encoded = model(ids(8, 0), ids(5, 1), output_encoder_hidden_only=True)
    assert encoded.shape == (8, 2, 16)
    assert torch.equal(model(ids(8, 0), ids(5, 1), encoder_hidden_states=encoded), model(ids(8, 0), ids(5, 1)))


def test_masks_of_three_dimensions_are_for_all_heads() -> None:
    model = t5()
    mask = torch.rand(2, 5, 8, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[..., 0] = False
    given = model(ids(8, 0), ids(5, 1), None, None, mask), model(ids(8, 0), ids(5, 1), None, None, mask[:, None])
    assert torch.equal(*given)


def test_dropout_of_the_two_stacks_differs() -> None:
    """Layers of the same number, tokens of the same index."""
    model, seen = t5(made_of=config(hidden_dropout=0.5, attention_dropout=0.5)), []
    keep = model.backend.dropout.keep_rows
    model.backend = model.backend.with_operations(
        dropout={"keep_rows": lambda draw, *rest: seen.append(draw.key) or keep(draw, *rest)}
    )
    model.train()(ids(8, 0), ids(8, 1))
    # Encoder: embedding, 2 layers of 3 sites; decoder: embedding, a layer of 5 sites.
    assert len(set(seen)) == len(seen) == 7 + 6


@pytest.mark.parametrize(
    ("settings", "options", "named"),
    [
        ({"num_query_groups": 2}, {}, "num_query_groups 2"),
        ({"num_moe_experts": 4}, {}, "num_moe_experts 4"),
        ({"qk_layernorm": True}, {}, "qk_layernorm"),
        ({}, {"position_embedding_type": "none"}, "position_embedding_type none"),
    ],
)
def test_what_t5_refuses(settings: dict[str, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        t5(made_of=config(**settings), **options)


def test_a_cache_of_too_many_tokens_is_refused() -> None:
    """More than the model has learned positions for."""
    model, context = t5(position_embedding_type="learned_absolute"), StaticInferenceContext(2, 99)
    context.begin(torch.tensor([99, 99]), 99)
    with pytest.raises(UserError, match="99 tokens in a row, but the model has learned positions for"):
        model(ids(8, 0), ids(5, 1), inference_params=context)
