"""Self-attention of one rank, and how ranks divide query groups."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron.core.backends import LOCAL, Backend
from megatron.core.communication.collectives import PlannedGroup
from megatron.core.exceptions import UserError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ops.normed_rope import normed_rope
from megatron.core.ops.rope import rotation_of_angles
from megatron.core.tokens import Tokens
from megatron.core.transformer.attention import SelfAttention, groups_of_rank
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

INPUTS = LayerInputs(Tokens(3, 2))


def attention(spec: Any = None, backend: Backend | None = None, **fields: Any) -> Any:
    settings = {"num_query_groups": 2, "fp64": True, "use_cpu_initialization": True, **fields}
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, **settings)
    spec = spec or get_gpt_layer_local_spec().submodules.self_attention
    return build_module(spec, config=config, layer_number=1, offer={"backend": backend}).eval()


def test_rows_of_the_projection_lie_by_group() -> None:
    made = attention()
    assert isinstance(made, SelfAttention)
    hidden = torch.randn(6, 16, dtype=torch.float64)
    query, key, value = made.get_query_key_value_tensors(hidden, INPUTS)
    rows = (hidden @ made.linear_qkv.weight.t() + made.linear_qkv.bias).view(3, 2, 2, 4, 4)  # group, heads, channels
    assert torch.equal(query, rows[..., :2, :].flatten(2, 3)) or torch.allclose(query, rows[..., :2, :].flatten(2, 3))
    torch.testing.assert_close(key, rows[..., 2, :])
    torch.testing.assert_close(value, rows[..., 3, :])


@pytest.mark.parametrize(
    ("fields", "calls_expected"),
    [
        ({}, 2),
        ({"attention_output_gate": True, "clip_qkv": 0.5}, 2),
        ({"layernorm_zero_centered_gamma": True}, 2),
        ({"normalization": "LayerNorm"}, 0),
        ({"norm_affine": False}, 0),
    ],
)
def test_heads_normed_and_rotated_in_one_operation_give_the_same_bits(
    fields: dict[str, Any], calls_expected: int
) -> None:
    calls, found = [], []

    def at_once(*arguments: Any) -> Any:
        calls.append(1)
        return normed_rope(*arguments)

    angles = torch.randn(3, 1, 1, 4, dtype=torch.float64)
    inputs = dataclasses.replace(INPUTS, rotation=rotation_of_angles(angles, interleaved=False))
    hidden = torch.randn(6, 16, dtype=torch.float64)
    spec = get_gpt_layer_local_spec(qk_layernorm=True).submodules.self_attention
    settings = {"normalization": "RMSNorm", "qk_layernorm": True, **fields}
    for operation in (None, at_once):
        torch.manual_seed(1)
        made = attention(spec, LOCAL.with_operations(attention={"normed_rope": operation}), **settings)
        output, _ = made(hidden, inputs)
        output.square().sum().backward()
        found.append([output, *(parameter.grad for parameter in made.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True) if pair[0] is not None)
    assert len(calls) == calls_expected
    made(hidden, INPUTS)  # without positions
    assert len(calls) == calls_expected


def test_a_hook_of_a_norm_of_heads_is_called() -> None:
    seen: list[Any] = []
    spec = get_gpt_layer_local_spec(qk_layernorm=True).submodules.self_attention
    backend = LOCAL.with_operations(attention={"normed_rope": normed_rope})
    made = attention(spec, backend, normalization="RMSNorm", qk_layernorm=True)
    assert made.rotates_normed_heads
    made.q_layernorm.register_forward_hook(lambda *arguments: seen.append(1))
    angles = torch.randn(3, 1, 1, 4, dtype=torch.float64)
    made(
        torch.randn(6, 16, dtype=torch.float64),
        dataclasses.replace(INPUTS, rotation=rotation_of_angles(angles, interleaved=False)),
    )
    assert seen == [1] and not made.rotates_normed_heads


def test_a_gate_multiplies_what_attention_gives() -> None:
    made, hidden = attention(attention_output_gate=True), torch.randn(6, 16, dtype=torch.float64)
    with torch.no_grad():
        made.linear_qkv.weight.view(2, 6, 4, 16)[:, 2:4] = 0.0  # gates come after a group's two queries
        half, bias = made(hidden, INPUTS)
        plain = attention()
        plain.linear_qkv.weight.view(2, 4, 4, 16).copy_(made.linear_qkv.weight.view(2, 6, 4, 16)[:, [0, 1, 4, 5]])
        plain.linear_proj.weight.copy_(made.linear_proj.weight)
        torch.testing.assert_close(half, plain(hidden, INPUTS)[0] / 2)  # sigmoid(0)
    assert bias is made.linear_proj.bias


@pytest.mark.parametrize(("groups", "ranks", "held"), [(8, 2, 4), (2, 8, 1), (1, 4, 1)])
def test_ranks_divide_groups_or_share_them(groups: int, ranks: int, held: int) -> None:
    assert groups_of_rank(groups, PlannedGroup(tuple(range(ranks)), 0)) == held


def test_groups_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_query_groups 6 and 4 .*: one has to divide the other; .* works is 4"):
        groups_of_rank(6, PlannedGroup((0, 1, 2, 3), 0))
