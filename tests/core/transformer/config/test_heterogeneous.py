"""Heterogeneous models: what a description says, and which key of a wrong one is named."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config.heterogeneous import DescribedLayer, described_layers
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_costs import flops_per_token, layer_cost
from megatron.core.transformer.mlp import LinearBranch
from megatron.core.transformer.recompute import recompute_parts
from megatron.core.transformer.transformer_config import TransformerConfig

OWN = {"attention": {"n_heads_in_group": 4, "no_op": False, "sparsify": None}, "ffn": {"ffn_mult": 5.25}}
EMPTY = {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"no_op": True, "ffn_mult": None}}
LINEAR = {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}}
NARROW = {"attention": {"num_query_groups": 1}, "ffn": {"intermediate_size": 24}}


def config(*blocks: Any, **fields: Any) -> TransformerConfig:
    text = {"heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": blocks})}
    sizes = {"num_layers": len(blocks), "hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 96}
    return TransformerConfig(**text | sizes | fields)


def test_sizes_and_kinds_of_layers() -> None:
    layers = described_layers(config(OWN, EMPTY, LINEAR, NARROW, {}))
    # int(2 * 5.25 * 64 / 3) = 224 channels, rounded up to a multiple of 256
    assert layers == (
        DescribedLayer("attention", "mlp", 2, 256),
        DescribedLayer(None, None, None, None),
        DescribedLayer("linear", "linear", None, None),
        DescribedLayer("attention", "mlp", 1, 24),
        DescribedLayer("attention", "mlp", None, None),
    )
    assert described_layers(config({"ffn": {"ffn_hidden_size": 24}})) == (layers[3]._replace(num_query_groups=None),)
    published = config({"ffn": {"ffn_mult": 5.25}}, hidden_size=8192)
    assert described_layers(published)[0].ffn_hidden_size == 28672  # type: ignore[index]  # as in Llama 3 70B
    assert described_layers(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)) is None


def test_a_file_is_kept_as_its_content(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 64, "rope_theta": 500000.0, "block_configs": [NARROW]}, indent=1))
    read = config(NARROW, heterogeneous_layers_config_path=str(path), heterogeneous_layers_config_encoded_json=None)
    assert read.heterogeneous_layers_config_encoded_json == config(NARROW).heterogeneous_layers_config_encoded_json
    assert read.heterogeneous_block_specs
    path.unlink()
    assert described_layers(dataclasses.replace(read)) == described_layers(read), "the content replaces the file"


def test_layers_are_built_with_their_sizes() -> None:
    made = config(
        OWN, EMPTY, LINEAR, NARROW, params_dtype=None, add_bias_linear=False, recompute_granularity="selective"
    )
    model = GPTModel(made, get_gpt_heterogeneous_layer_spec(made), vocab_size=32, max_sequence_length=8)
    own, empty, linear, narrow = model.decoder.layers
    assert (
        own.self_attention.linear_qkv.weight.shape == (64 + 2 * 2 * 8, 64) and own.mlp.linear_fc1.weight.shape[0] == 256
    )
    assert (
        narrow.self_attention.linear_qkv.weight.shape[0] == 64 + 2 * 8 and narrow.mlp.linear_fc2.weight.shape[1] == 24
    )
    assert isinstance(empty.self_attention, IdentityOp) and not list(empty.parameters())
    for branch in (linear.self_attention, linear.mlp):
        assert isinstance(branch, LinearBranch) and branch.weight.shape == (64, 64) and branch.bias is None
    recompute_parts(linear, ["core_attn", "mlp", "layernorm"])
    with pytest.raises(UserError, match="the config describes layers that are alike"):
        get_gpt_heterogeneous_layer_spec(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))


def test_costs_are_those_of_each_layer() -> None:
    made = config(OWN, EMPTY, LINEAR, NARROW)
    plain = config({}, num_query_groups=2, ffn_hidden_size=256)
    costs = [layer_cost(made, number, 16) for number in (1, 2, 3, 4)]
    assert costs[:3] == [layer_cost(plain, 1, 16), 0, 2 * 64**2]
    assert costs[0] - costs[3] == 64 * (2 * 8 * (2 - 1) + 2 * (256 - 24))
    scores = 2 * (2 * 64 * 8 - 2 * 64 * (17 // 2))  # Megatron-LM's count: half of the keys of two layers
    assert flops_per_token(made, 128, 16) == 6 * (sum(costs) + scores + 64 * 128)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ([], "block_configs[1] is []; it must be an object with the keys attention, ffn"),
        ({"mamba": {}}, "block_configs[1].mamba: unknown key; the keys are attention, ffn"),
        ({"ffn": {"width": 8}}, "block_configs[1].ffn.width: unknown key; the keys are no_op"),
        ({"ffn": {"no_op": "yes"}}, 'block_configs[1].ffn.no_op is "yes"; it must be true or false'),
        ({"ffn": {"no_op": 1}}, "block_configs[1].ffn.no_op is 1; it must be true or false"),
        ({"ffn": {"intermediate_size": 1.5}}, "ffn.intermediate_size is 1.5; it must be a positive whole number"),
        ({"ffn": {"ffn_mult": True}}, "block_configs[1].ffn.ffn_mult is true; it must be a positive number"),
        ({"ffn": {"ffn_mult": 1e999}}, "block_configs[1].ffn.ffn_mult is Infinity; it must be a positive number"),
        ({"ffn": {"ffn_mult": 1e308}}, "block_configs[1].ffn.ffn_mult is 1e+308; a layer is not that large"),
        ({"ffn": {"ffn_mult": 5.25, "intermediate_size": 64}}, "ffn_mult 5.25 makes it 256"),
        ({"ffn": {"ffn_hidden_size": 24, "intermediate_size": 64}}, "intermediate_size is 64, but ffn_hidden_size 24"),
        ({"attention": {"num_query_groups": 3}}, "num_query_groups 3 does not divide the 8 attention heads"),
        ({"attention": {"n_heads_in_group": 5}}, "n_heads_in_group 5 does not divide the 8 attention heads"),
        ({"attention": {"window_length": 64}}, "attention.window_length is 64: not yet; null or false works"),
        ({"attention": {"no_op": True, "replace_with_linear": True}}, "has both no_op and replace_with_linear"),
    ],
)
def test_wrong_keys_are_named(block: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        config({}, block)
    assert "heterogeneous_layers_config_encoded_json: " in str(error.value) and message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not JSON: "),
        ("[]", "there must be a list block_configs"),
        ('{"block_configs": [{}]}', "block_configs has 1 entries for 2 layers; give one for each layer"),
        ('{"block_configs": [{}, {}], "hidden_size": 8192}', "hidden_size is 8192, but the model has 64"),
        (None, "cannot be read: "),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "layers.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as error:
        config({}, {}, heterogeneous_layers_config_path=str(path), heterogeneous_layers_config_encoded_json=None)
    assert f"heterogeneous_layers_config_path {path}: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_moe_experts": 2}, "num_moe_experts 2 does not go with heterogeneous_layers_config_encoded_json"),
        ({"norm_placement": "parallel"}, "whose layers may lack attention or MLP; pre works"),
        ({"mtp_num_layers": 1}, "mtp_num_layers 1 does not go with"),
        (
            {"tensor_model_parallel_size": 3, "num_attention_heads": 12, "num_query_groups": 3},
            "block_configs[0].attention: tensor_model_parallel_size 3 and 2 query groups: one has to divide the other",
        ),
        (
            {"tensor_model_parallel_size": 16, "num_attention_heads": 16},
            "16 does not divide the 24 channels of the MLP",
        ),
        ({"tensor_model_parallel_size": 4, "fp8": "e4m3"}, "ranks that share a key and value head are not supported"),
    ],
)
def test_other_fields_fit(fields: dict[str, Any], message: str) -> None:
    block = {"attention": {"num_query_groups": 2}, "ffn": {"intermediate_size": 24}}
    with pytest.raises(UserError) as error:
        config(block, **fields)
    assert message in str(error.value)
