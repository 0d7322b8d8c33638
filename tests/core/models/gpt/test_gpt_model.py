"""Every switch of the model against a plainly written one, in float64."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from support.reference_gpt import reference_logits, reference_loss
from support.tiny_models import randomize, tiny_config

from megatron.core.exceptions import UserError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ops.activation import quick_gelu, squared_relu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokens import Tokens
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "ffn_hidden_size": 24,
}
ROPE = {"position_embedding_type": "rope"}
UNTIED = {"share_embeddings_and_output_weights": False}

# name: (settings of the config, keywords of the model)
SWITCHES = {
    "gpt2": ({}, {}),
    "gpt2 fused gelu": ({"bias_activation_fusion": True}, {}),
    "llama": (LLAMA, ROPE | UNTIED),
    "no positions": ({}, {"position_embedding_type": "none"}),
    "rope interleaved": ({"rotary_interleaved": True, "kv_channels": 8}, ROPE),
    "rope partial": ({"kv_channels": 8}, ROPE | {"rotary_percent": 0.5}),
    "rope partial interleaved": ({"rotary_interleaved": True, "kv_channels": 8}, ROPE | {"rotary_percent": 0.5}),
    "rope base": ({}, ROPE | {"rotary_base": 500000}),
    "rope llama3 scaling": ({"kv_channels": 32}, ROPE | {"rotary_base": 500000, "rope_scaling": True}),
    "rope llama3 scaling factor": (
        {"kv_channels": 32},
        ROPE | {"rotary_base": 500000, "rope_scaling": True, "rope_scaling_factor": 32.0},
    ),
    "rope interpolation": ({}, ROPE | {"seq_len_interpolation_factor": 3.0}),
    "rope not in every second layer": ({"no_rope_freq": 2}, ROPE),
    "rope by list": ({"no_rope_freq": [1, 0]}, ROPE),
    "RMSNorm": ({"normalization": "RMSNorm"}, {}),
    "LayerNorm zero-centred": ({"layernorm_zero_centered_gamma": True}, {}),
    "RMSNorm zero-centred": ({"layernorm_zero_centered_gamma": True, "normalization": "RMSNorm"}, {}),
    "norm epsilon": ({"layernorm_epsilon": 0.1}, {}),
    "squared relu": ({"activation_func": squared_relu}, {}),
    "quick geglu": ({"activation_func": quick_gelu, "gated_linear_unit": True}, {}),
    "geglu": ({"gated_linear_unit": True}, {}),
    "geglu fused": ({"gated_linear_unit": True, "bias_activation_fusion": True}, {}),
    "clamped": (
        {
            "activation_func": quick_gelu,
            "gated_linear_unit": True,
            "activation_func_clamp_value": 0.3,
            "glu_linear_offset": 1.0,
        },
        {},
    ),
    "no biases": ({"add_bias_linear": False}, {}),
    "qkv bias alone": ({"add_bias_linear": False, "add_qkv_bias": True}, {}),
    "GQA": ({"num_query_groups": 2}, {}),
    "MQA": ({"num_query_groups": 1}, ROPE),
    "kv_channels": ({"kv_channels": 6, "num_query_groups": 2}, ROPE),
    "qk_layernorm": ({"qk_layernorm": True, "num_query_groups": 2}, ROPE),
    "qk_layernorm RMSNorm zero-centred": (
        {"qk_layernorm": True, "normalization": "RMSNorm", "layernorm_zero_centered_gamma": True},
        ROPE,
    ),
    "untied": ({}, UNTIED),
    "residual after the norm": ({"apply_residual_connection_post_layernorm": True}, {}),
    "softmax_scale": ({"softmax_scale": 0.7}, {}),
    "query-key layer scaling": ({"apply_query_key_layer_scaling": True}, {}),
    "softmax not in fp32": ({"attention_softmax_in_fp32": False}, {}),
    "window": ({"window_size": (4, 0)}, {}),
    "window by layer": ({"window_size": (4, 0), "window_attn_skip_freq": 2}, {}),
    "window by list": ({"window_size": (4, 0), "window_attn_skip_freq": [0, 1]}, {}),
    "window without limit": ({"window_size": (-1, 0)}, {}),
    "softmax off by one": ({"softmax_type": "off-by-one"}, {}),
    "softmax learnable": ({"softmax_type": "learnable", "num_query_groups": 2}, {}),
    "unfused": ({"attention_backend": AttnBackend.unfused, "num_query_groups": 2}, ROPE),
    "unfused window": ({"attention_backend": AttnBackend.unfused, "window_size": (3, 0)}, ROPE),
}


def build(settings: dict, model: dict, **more) -> tuple[GPTModel, dict]:
    config = tiny_config(**settings)
    model = {"vocab_size": 37, "max_sequence_length": 16, "share_embeddings_and_output_weights": True} | model | more
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    gpt = GPTModel(config, spec, **model)
    randomize(gpt)
    return gpt, model


def batch(b: int = 2, s: int = 13, vocab: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (b, s + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def check(gpt: GPTModel, model: dict, call: dict, reference: dict | None = None, **shape) -> None:
    """Logits, losses and the gradient of every parameter equal the reference's."""
    tokens, labels = batch(**shape)
    weights = {name: value.detach().clone().requires_grad_() for name, value in gpt.state_dict().items()}
    expected = reference_logits(weights, gpt.config, model, tokens, **(reference or {}))
    close(gpt(tokens, **call), expected, "logits")
    loss = gpt(tokens, labels=labels, **call)
    expected_loss = reference_loss(expected, labels)
    close(loss, expected_loss, "loss")
    weight = torch.rand(loss.shape, dtype=loss.dtype, generator=torch.Generator().manual_seed(2))
    (loss * weight).sum().backward()
    (expected_loss * weight).sum().backward()
    for name, parameter in gpt.named_parameters():
        close(parameter.grad, weights[name].grad, name)


def close(ours: torch.Tensor, expected: torch.Tensor, name: str, tolerance: float = 1e-11) -> None:
    assert ours.dtype is torch.float64 and ours.shape == expected.shape, name
    error = (ours - expected).abs().max() / expected.abs().max()
    assert error < tolerance, (name, error.item())


@pytest.mark.parametrize("switch", SWITCHES)
def test_switch_against_a_plain_model(switch: str) -> None:
    check(*build(*SWITCHES[switch]), call={})


def test_every_switch_changes_the_result() -> None:
    # A reference that shared a switch's neglect with the product would agree with it. What may change nothing: scaling
    # that is undone, the precision of a softmax in float64, an infinite window, another implementation.
    same = {"query-key layer scaling", "softmax not in fp32", "window without limit", "unfused"}
    tokens, _ = batch()
    results = {}
    for name, (settings, model) in SWITCHES.items():
        if name not in same:
            gpt, _ = build(settings, model)
            results[name] = round(gpt(tokens).double().abs().sum().item(), 9)
    assert len(set(results.values())) == len(results), results


def test_explicit_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2]])
    for model in ({}, ROPE):
        check(*build({}, model), call={"position_ids": positions}, reference={"positions": positions})


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.unfused])
def test_explicit_mask(backend: AttnBackend) -> None:
    hidden = torch.rand(2, 13, 13, generator=torch.Generator().manual_seed(3)) < 0.3
    hidden[:, range(13), range(13)] = False  # a query without any key has no meaning
    settings = {"attention_backend": backend, "num_query_groups": 2}
    check(*build(settings, ROPE), call={"attention_mask": hidden[:, None]}, reference={"hidden_pairs": hidden})


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.unfused])
@pytest.mark.parametrize("model", [{}, ROPE])
def test_packed_documents_equal_separate_ones(backend: AttnBackend, model: dict) -> None:
    lengths = [3, 5, 0, 1, 4]  # a boundary may be repeated: an empty document
    gpt, _ = build({"attention_backend": backend, "num_query_groups": 2}, model)
    tokens, labels = batch(b=1)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    record = Tokens(13, 1, cu_seqlens=cu_seqlens, max_seqlen=5)
    packed = gpt(tokens, labels=labels, tokens=record)
    packed.sum().backward()
    gradients = {name: parameter.grad for name, parameter in gpt.named_parameters()}
    gpt.zero_grad()
    parts = [(a, b) for a, b in zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True) if a.shape[1]]
    separate = torch.cat([gpt(a, labels=b) for a, b in parts], 1)
    separate.sum().backward()
    close(packed, separate, "loss")
    for name, parameter in gpt.named_parameters():
        close(gradients[name], parameter.grad, name)
    megatron_lm = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=5)
    assert torch.equal(packed, gpt(tokens, labels=labels, packed_seq_params=megatron_lm))


def test_padded_vocabulary_changes_nothing() -> None:
    gpt, _ = build({}, UNTIED)
    padded, _ = build({}, UNTIED, vocab_padding_multiple=16)
    assert padded.output_layer.weight.shape == (48, 16) and padded.embedding.word_embeddings.weight.shape == (48, 16)
    with torch.no_grad():
        for name, value in gpt.state_dict().items():
            target = padded.state_dict()[name]
            target.zero_()
            target[: value.shape[0]] = value
        padded.output_layer.weight[37:] = 100.0  # would drown every softmax that it entered
    tokens, labels = batch()
    close(padded(tokens), gpt(tokens), "logits")
    loss = padded(tokens, labels=labels)
    close(loss, gpt(tokens, labels=labels), "loss")
    loss.sum().backward()
    assert not padded.output_layer.weight.grad[37:].any()


def test_negative_labels_have_no_loss() -> None:
    gpt, _ = build({}, {})
    tokens, labels = batch()
    labels = labels.clone()
    labels[0, 3] = -100
    loss = gpt(tokens, labels=labels)
    loss[0, 3].backward()
    assert loss[0, 3] == 0 and not any(parameter.grad.any() for parameter in gpt.parameters())


def test_tied_weight_is_one_parameter() -> None:
    gpt, _ = build({}, {})
    assert "output_layer.weight" not in gpt.state_dict()
    assert gpt.shared_embedding_or_output_weight() is gpt.embedding.word_embeddings.weight


def test_initial_weights_are_functions_of_seed_and_name() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, gated_linear_unit=True)

    def made(**changes) -> dict:
        keywords = {"vocab_size": 96, "max_sequence_length": 32, "share_embeddings_and_output_weights": False}
        vocab = changes.pop("vocab_padding_multiple", None)
        gpt = GPTModel(
            dataclasses.replace(config, **changes), get_gpt_layer_local_spec(), **keywords, vocab_padding_multiple=vocab
        )
        return gpt.state_dict()

    first, again, other = made(), made(), made(seed=4321)
    padded = made(vocab_padding_multiple=64)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, padded[name][: value.shape[0]]), name
        if name.endswith("bias"):
            assert not value.any(), name
        elif "layernorm" in name:
            assert (value == 1).all(), name
        else:
            assert not torch.equal(value, other[name]), name
            scaled = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            assert value.std().item() == pytest.approx(0.02 / 2 if scaled else 0.02, rel=0.05), name
    assert not torch.equal(
        first["decoder.layers.0.mlp.linear_fc1.weight"], first["decoder.layers.1.mlp.linear_fc1.weight"]
    )
    assert not padded["output_layer.weight"][96:].any()


def test_descriptors_name_the_parts_that_a_rank_holds() -> None:
    gpt, _ = build(LLAMA | {"num_query_groups": 2}, ROPE | UNTIED, vocab_padding_multiple=16)
    info = {parameter.info.name: parameter.info for parameter in gpt.parameters()}
    assert info["decoder.layers.1.self_attention.linear_qkv.weight"].global_shape == (2, 4, 4, 16)
    assert info["decoder.layers.1.mlp.linear_fc1.weight"].global_shape == (2, 24, 16)
    assert info["output_layer.weight"].global_shape == (37, 16) and info["output_layer.weight"].padding == 11 * 16
    assert info["embedding.word_embeddings.weight"].embedding_or_output


def test_refusals_name_the_value() -> None:
    for change, words in [
        ({"position_embedding_type": "yarn"}, "position_embedding_type yarn"),
        ({"mtp_block_spec": object()}, "mtp_block_spec"),
    ]:
        with pytest.raises(UserError, match=words):
            build({}, change)
    gpt, _ = build({}, {})
    with pytest.raises(UserError, match=r"17 tokens in a row, but the model has learned positions for 16"):
        gpt(torch.zeros(1, 17, dtype=torch.int64))


def test_a_padding_mask_changes_nothing_without_experts() -> None:
    ids = torch.arange(6).view(1, 6)
    mask = torch.tensor([[False] * 4 + [True] * 2])
    dense, _ = build({}, {})
    assert torch.equal(dense(ids, padding_mask=mask), dense(ids))
    with pytest.raises(UserError, match=r"padding_mask has the shape \[6, 1\]; .* \[b, s\], is \[1, 6\]"):
        dense(ids, padding_mask=mask.t())


def test_the_factor_of_an_embedding_is_rounded_as_its_weights_are() -> None:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "use_cpu_initialization": True}
    config = TransformerConfig(embedding_multiplier=3072**0.5, bf16=True, params_dtype=torch.bfloat16, **sizes)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=11, max_sequence_length=8, **ROPE).eval()
    ids = torch.arange(8)[None]
    assert torch.tensor(3072**0.5).bfloat16() == 55.5
    expected = model.embedding.word_embeddings.weight[:8, None] * 55.5
    assert torch.equal(model.embedding(ids, ids), expected)
