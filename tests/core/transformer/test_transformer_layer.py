"""Layers and blocks by themselves: formulas, places left empty, users' own parts, half precision."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config, tiny_gpt
from torch import Tensor, nn

from megatron.core.backends import LOCAL, Backend
from megatron.core.exceptions import UserError
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.ops.norm_triton import layer_norm_with_residual_triton, rms_norm_with_residual_triton
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokens import Tokens
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_inputs import EncoderStates, LayerInputs
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.recompute import recompute_parts
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def states(s: int = 5, b: int = 2) -> Tensor:
    return torch.randn(s, b, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_layer_is_its_formula() -> None:
    layer = build_module(get_gpt_layer_local_spec(), config=tiny_config(), layer_number=2)
    assert layer.canonical_index == 1
    hidden, inputs = states().flatten(0, 1), LayerInputs(Tokens(5, 2))
    by_hand = hidden + layer.self_attention(layer.input_layernorm(hidden), inputs)[0]
    by_hand = by_hand + layer.mlp(layer.pre_mlp_layernorm(by_hand))[0]
    assert torch.allclose(layer(hidden, inputs), by_hand, rtol=1e-13)


KERNELS = LOCAL.with_operations(
    norms={
        "layer_norm_with_residual": layer_norm_with_residual_triton,
        "rms_norm_with_residual": rms_norm_with_residual_triton,
    }
)


def gradients(backend: Backend, recomputed: list[str], **settings) -> tuple[list[Tensor], int]:
    """Returns output and gradients of a layer, and how many operations of its backward add two gradients."""
    settings = {"fp64": False, "hidden_dropout": 0.1} | settings
    spec = get_gpt_layer_local_spec(norm_placement=settings["norm_placement"])
    torch.manual_seed(0)
    layer = TransformerLayer(tiny_config(**settings), spec.submodules, 1, backend=backend)
    recompute_parts(layer, recomputed)
    hidden, inputs = states().float().flatten(0, 1).requires_grad_(), LayerInputs(Tokens(5, 2))
    output = layer(hidden, inputs)
    with torch.autograd.profiler.profile() as profile:
        (output * output.detach().cos()).sum().backward()
    adds = sum(event.count for event in profile.key_averages() if event.key in ("aten::add", "aten::add_"))
    assert hidden.grad is not None
    return [output.detach(), hidden.grad, *(parameter.grad for parameter in layer.parameters())], adds


@pytest.mark.fast(
    "kept-pre-LayerNorm",
    "kept-sandwich-LayerNorm",
    "kept-parallel-RMSNorm",
    "recomputed-pre-LayerNorm",
    "recomputed-sandwich-RMSNorm",
)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("placement", ["pre", "sandwich", "parallel"])
@pytest.mark.parametrize("recomputed", [[], ["layernorm", "mlp"]], ids=["kept", "recomputed"])
def test_a_norms_backward_adds_the_gradient_of_the_residual(kind: str, placement: str, recomputed: list[str]) -> None:
    settings = {"normalization": kind, "norm_placement": placement}
    expected, adds = gradients(LOCAL, recomputed, **settings)
    found, fewer = gradients(KERNELS, recomputed, **settings)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-5 * float(theirs.abs().max()))
    assert adds - fewer == (1 if placement == "parallel" else 2)


class Experts(MoELayer):
    """A layer of experts that counts the residuals that it adds."""

    residuals = 0

    def forward(self, hidden_states, inputs=None, residual=None):  # type: ignore[no-untyped-def]
        self.residuals += residual is not None
        return super().forward(hidden_states, inputs, residual)


class OldExperts(MoELayer):
    """A script's layer of experts, which knows no residual."""

    def forward(self, hidden_states, inputs=None):  # type: ignore[no-untyped-def]
        return super().forward(hidden_states, inputs)


@pytest.mark.parametrize("shared", [None, 12])
@pytest.mark.parametrize(
    ("settings", "adds"),
    [
        ({}, True),
        ({"norm_placement": "post_residual"}, True),
        ({"norm_placement": "parallel"}, True),
        ({"norm_placement": "post"}, False),
        ({"residual_multiplier": 0.5}, False),
        ({"hidden_dropout": 0.1}, False),
    ],
)
def test_experts_add_the_residual_where_nothing_comes_between(
    settings: dict[str, Any], adds: bool, shared: int | None
) -> None:
    config = tiny_config(num_moe_experts=4, moe_shared_expert_intermediate_size=shared, **settings)
    spec = get_gpt_layer_local_spec(num_experts=4, norm_placement=config.norm_placement).submodules
    inputs, outputs = LayerInputs(Tokens(5, 2)), []
    for kind in (Experts, OldExperts):
        torch.manual_seed(0)
        layer = TransformerLayer(config, replace(spec, mlp=ModuleSpec(kind)), 1).eval()
        outputs.append(layer(states().flatten(0, 1), inputs))
        if kind is Experts:
            assert layer.mlp.residuals == (adds or "hidden_dropout" in settings)  # an evaluation drops nothing
            layer.train()(states().flatten(0, 1), inputs)
            assert layer.mlp.residuals == 2 * adds + (not adds and "hidden_dropout" in settings)
            layer.mlp.register_forward_hook(lambda module, given, output: outputs.append(given))
            layer.eval()(states().flatten(0, 1), inputs)
            assert len(outputs.pop()) == 2  # the hook saw no residual
    torch.testing.assert_close(*outputs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("left_out", ["self_attention", "mlp"])
def test_a_layer_of_one_branch(left_out: str) -> None:
    parts = get_gpt_layer_local_spec().submodules
    whole = build_module(ModuleSpec(TransformerLayer, submodules=parts), config=tiny_config(), layer_number=1)
    setattr(parts, left_out, IdentityOp)
    setattr(parts, "input_layernorm" if left_out == "self_attention" else "pre_mlp_layernorm", IdentityOp)
    layer = build_module(ModuleSpec(TransformerLayer, submodules=parts), config=tiny_config(), layer_number=1)
    recompute_parts(layer, ["core_attn", "mlp", "layernorm"])
    layer.load_state_dict(whole.state_dict(), strict=False)
    hidden, inputs = states().flatten(0, 1), LayerInputs(Tokens(5, 2))
    expected = whole.add_mlp(hidden, inputs) if left_out == "self_attention" else whole.add_attention(hidden, inputs)
    assert torch.equal(layer(hidden, inputs), expected)


class AddsEncoder(nn.Module):
    """A cross attention: the hidden states plus the encoder's."""

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: object) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, inputs: LayerInputs) -> tuple[Tensor, None]:
        return hidden_states + inputs.encoder.hidden_states, None


def cross_layer(**settings) -> TransformerLayer:
    parts = get_gpt_layer_local_spec().submodules
    parts.pre_cross_attn_layernorm, parts.cross_attention = WrappedTorchNorm, AddsEncoder
    parts.cross_attn_bda = get_bias_dropout_add
    return build_module(ModuleSpec(TransformerLayer, submodules=parts), config=tiny_config(**settings), layer_number=1)


@pytest.mark.parametrize("multiplier", [1.0, 0.5])
def test_cross_attention_stands_between_attention_and_mlp(multiplier: float) -> None:
    layer = cross_layer(residual_multiplier=multiplier)
    hidden, encoder = states().flatten(0, 1), torch.randn(10, 16, dtype=torch.float64)
    inputs = LayerInputs(Tokens(5, 2), encoder=EncoderStates(encoder, Tokens(5, 2)))
    attended = layer.add_attention(hidden, inputs)
    crossed = attended + multiplier * (layer.pre_cross_attn_layernorm(attended) + encoder)
    assert torch.allclose(layer(hidden, inputs), layer.add_mlp(crossed, inputs), rtol=1e-13)


def test_other_placements_of_norms_with_cross_attention_are_refused() -> None:
    with pytest.raises(UserError, match="norm_placement is parallel: a layer with cross attention"):
        cross_layer(norm_placement="parallel")


def test_a_place_left_empty_does_nothing() -> None:
    layer = build_module(ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules()), config=tiny_config())
    assert not list(layer.parameters())


class Doubling(nn.Module):
    """An MLP of a user: only Megatron-LM's parameters."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        return hidden_states * 2, None


def own_bias_dropout_add(training: bool, fused: bool):
    return lambda x_with_bias, residual, prob: residual - x_with_bias[0]


def test_parts_of_a_user() -> None:
    spec = ModuleSpec(
        TransformerLayer, submodules=TransformerLayerSubmodules(mlp=Doubling, mlp_bda=own_bias_dropout_add)
    )
    layer = build_module(spec, config=tiny_config())
    hidden = states().flatten(0, 1)
    assert torch.equal(layer.add_mlp(hidden, LayerInputs(Tokens(5, 2))), hidden - 2 * hidden)


def test_a_lone_block() -> None:
    spec = get_gpt_decoder_block_spec(tiny_config(), use_transformer_engine=False)
    torch.manual_seed(0)
    block = TransformerBlock(tiny_config(), spec)
    hidden = states()
    output = block(hidden, None)
    assert output.shape == hidden.shape
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)[None, None]
    assert torch.allclose(block(hidden, mask), output, rtol=1e-12)  # the causal rule is the layer's own
    block.set_input_tensor(hidden)
    assert torch.equal(block(None, None), output)
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=3, max_seqlen_kv=3)
    separate = torch.cat([block(hidden[:2, :1]), block(hidden[2:, :1])])
    assert torch.allclose(block(hidden[:, :1], packed_seq_params=packed), separate, rtol=1e-12)


def test_a_block_needs_a_spec_for_each_layer() -> None:
    with pytest.raises(UserError, match="1 layer specs for 2 layers"):
        TransformerBlock(tiny_config(), TransformerBlockSubmodules([get_gpt_layer_local_spec()]))


def test_what_a_spec_and_a_config_say_must_agree() -> None:
    with pytest.raises(UserError, match="qk_layernorm"):
        build_module(get_gpt_layer_local_spec(), config=tiny_config(qk_layernorm=True))
    with pytest.raises(UserError, match="need a gated MLP"):
        build_module(get_gpt_layer_local_spec(), config=tiny_config(glu_linear_offset=1.0))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_float32_residual_stream(normalization: str) -> None:
    wide = {"bf16": True, "fp32_residual_connection": True, "normalization": normalization}
    model = tiny_gpt(tiny_config(fp64=False, hidden_dropout=0.1, **wide))
    seen: list[torch.dtype] = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        layer.self_attention.register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    loss = model(torch.arange(10).view(2, 5), labels=torch.arange(10).view(2, 5))
    loss.sum().backward()
    assert seen == [torch.bfloat16, torch.float32] * 2
    assert all(parameter.grad.dtype is torch.bfloat16 for parameter in model.parameters())
