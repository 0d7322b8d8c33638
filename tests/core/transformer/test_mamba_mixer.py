"""Mamba-2 mixers against `transformers`, packed documents, what a mixer refuses, recompute."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from megatron.core.exceptions import UserError
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.mamba_mixer import MambaMixer, TimeStepBias
from megatron.core.transformer.recompute import recompute_parts
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

HIDDEN, HEADS, WIDTH, GROUPS, STATE, KERNEL = 16, 8, 4, 2, 5, 3


def config(**settings) -> TransformerConfig:
    sizes = {"mamba_head_dim": WIDTH, "mamba_num_groups": GROUPS, "mamba_state_dim": STATE}
    settings = {"num_attention_heads": 2, "fp64": True, "hidden_dropout": 0.0, **sizes, **settings}
    return TransformerConfig(
        hybrid_layer_pattern="M", hidden_size=HIDDEN, mamba_conv_kernel_dim=KERNEL, normalization="RMSNorm", **settings
    )


def layer(**settings) -> TransformerLayer:
    torch.manual_seed(1)
    own = config(**settings)
    built: TransformerLayer = build_module(gpt_layer_spec_of(own, 1), config=own, layer_number=1)
    return built


def states(length: int, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(length, batch, HIDDEN, dtype=torch.float64, generator=generator)


def by_group(rows: Tensor, widths: list[int]) -> Tensor:
    """Reorders rows that are one part after the other, each with its groups, so that each group has its parts."""
    return torch.cat([part.unflatten(0, (GROUPS, -1)) for part in rows.split(widths)], 1).flatten(0, 1)


def become(mixer: MambaMixer, other: Mamba2Mixer) -> None:
    """Gives a mixer the weights of one of `transformers`."""
    channels, state = HEADS * WIDTH, GROUPS * STATE
    rows = by_group(other.in_proj.weight, [channels, channels, state, state, HEADS])
    taken = {
        "in_proj.weight": rows,
        "conv1d.weight": by_group(other.conv1d.weight[:, 0], [channels, state, state]),
        "conv1d.bias": by_group(other.conv1d.bias, [channels, state, state]),
        "norm_weight": other.norm.weight,
        "out_proj.weight": other.out_proj.weight,
        **{name: getattr(other, name) for name in ("A_log", "D", "dt_bias")},
    }
    mixer.load_state_dict(taken)


@pytest.mark.parametrize("min_step", [0.0, 0.2])
def test_a_mixer_is_that_of_transformers(min_step: float) -> None:
    sizes = {"num_heads": HEADS, "head_dim": WIDTH, "hidden_size": HIDDEN, "state_size": STATE, "n_groups": GROUPS}
    theirs = Mamba2Config(
        **sizes, num_hidden_layers=1, conv_kernel=KERNEL, chunk_size=4, time_step_limit=(min_step, float("inf"))
    )
    torch.manual_seed(0)
    other = Mamba2Mixer(theirs, 0).double()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    mixer = layer(mamba_min_time_step=min_step).self_attention
    become(mixer, other)
    hidden = states(11, 2)
    with mock.patch.object(Tensor, "float", Tensor.double), torch.no_grad():
        expected = other(hidden.transpose(0, 1)).transpose(0, 1)
    found = mixer(hidden.flatten(0, 1), LayerInputs(Tokens(11, 2)))[0].view(hidden.shape)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # theirs norms in float32


def test_packed_documents_are_rows_of_their_own() -> None:
    own = layer()
    lengths = [5, 1, 7]
    hidden = states(sum(lengths))
    bounds = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    together = own(hidden[:, 0], LayerInputs(Tokens(13, 1, cu_seqlens=bounds, max_seqlen=7)))
    apart = [own(part[:, 0], LayerInputs(Tokens(len(part), 1))) for part in hidden.split(lengths)]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-12, atol=1e-12)


def test_what_a_state_cannot_respect_is_refused() -> None:
    own, hidden = layer(), states(4)[:, 0]
    with pytest.raises(UserError, match="cannot follow an attention_mask"):
        own(hidden, LayerInputs(Tokens(4, 1), attention_mask=torch.zeros(1, 1, 4, 4, dtype=torch.bool)))


def test_recompute_changes_no_gradient() -> None:
    results = []
    for modules in ([], ["core_attn", "layernorm"]):
        own, hidden = layer(), states(6).requires_grad_()
        recompute_parts(own, modules)
        own(hidden[:, 0], LayerInputs(Tokens(6, 1))).square().sum().backward()
        results.append([hidden.grad, *(parameter.grad for parameter in own.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_initial_step_sizes() -> None:
    torch.manual_seed(0)
    steps = torch.nn.functional.softplus(TimeStepBias()(torch.empty(1000, dtype=torch.float64)))
    assert 0.001 <= steps.min() < 0.0011 and 0.09 < steps.max() <= 0.1
    assert steps.log().mean().item() == pytest.approx(torch.tensor(0.01).log().item(), abs=0.1)


def test_the_type_of_states_between_chunks() -> None:
    """--mamba-training-ssm-states-dtype"""
    for given, expected in (("bf16", torch.bfloat16), ("fp32", None), (None, None)):
        assert layer(mamba_training_ssm_states_dtype=given).self_attention.scan.settings["states_dtype"] is expected
