"""DeepSeek-V3.2: published settings, layers by type, and what is refused. `test_deepseek.py` has its layers of
multi-token prediction."""

from typing import Any

import pytest
from conversion.test_deepseek import OF_V3

from megatron.conversion.families import family_of
from megatron.core.exceptions import UserError

V32 = family_of("DeepseekV32ForCausalLM")


def test_deepseek_v32() -> None:
    fields = V32.fields_of(OF_V3)
    assert fields["experimental_attention_variant"] == "dsa"
    sizes = [fields[f"dsa_indexer_{name}"] for name in ("n_heads", "head_dim", "topk")]
    assert sizes == [64, 128, 2048]
    assert fields["moe_layer_freq"] == [0] * 3 + [1] * 58 and fields["mtp_num_layers"] == 1
    assert "dsa_indexer_k_norm_epsilon" not in fields and "mtp_num_layers" not in V32.fields_of({})
    assert V32.fields_of({"rms_norm_eps": 1e-5})["dsa_indexer_k_norm_epsilon"] == 1e-6


def test_types_of_layers_overrule_the_number_of_dense_ones() -> None:
    layers = {"num_hidden_layers": 3, "first_k_dense_replace": 2}
    assert V32.fields_of(layers)["moe_layer_freq"] == [0, 0, 1]
    assert V32.fields_of(layers | {"mlp_layer_types": ["sparse"] * 3})["moe_layer_freq"] == 1
    fields = V32.fields_of(layers | {"mlp_layer_types": ["sparse", "dense", "sparse"]})
    assert fields["moe_layer_freq"] == [1, 0, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q_lora_rank": None}, "q_lora_rank is None; it must be an integer (--q-lora-rank)"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types has 'full_attention'; only 'indexed_attention' is supported",
        ),
        ({"mlp_layer_types": ["sparse", "moe"]}, "mlp_layer_types has 'moe'; dense and sparse are supported"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types has 1 entries, but num_hidden_layers is 61"),
        ({"index_topk": "all"}, "index_topk is 'all', but must be an integer"),
        ({"num_experts": 8, "n_routed_experts": 16}, "n_routed_experts is 16, but num_experts is 8; they are the same"),
    ],
)
def test_what_is_unsupported_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        V32.fields_of(change)
    assert str(refusal.value).startswith(f"config.json: {said}")
