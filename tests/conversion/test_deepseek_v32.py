"""DeepSeek-V3.2: published settings, layers by type, and what is refused. `test_deepseek.py` has its layers of
multi-token prediction."""

from conversion.oracles import sizes_of
from conversion.test_deepseek import OF_V3

from megatron.conversion.families import family_of

V32 = family_of("DeepseekV32ForCausalLM")


def test_deepseek_v32() -> None:
    fields = V32.fields_of(sizes_of(V32) | OF_V3)
    assert fields["experimental_attention_variant"] == "dsa"
    sizes = [fields[f"dsa_indexer_{name}"] for name in ("n_heads", "head_dim", "topk")]
    assert sizes == [64, 128, 2048]
    assert fields["moe_layer_freq"] == [0] * 3 + [1] * 58 and fields["mtp_num_layers"] == 1
    assert "dsa_indexer_k_norm_epsilon" not in fields and "mtp_num_layers" not in V32.fields_of(sizes_of(V32))
    assert V32.fields_of(sizes_of(V32) | {"rms_norm_eps": 1e-5})["dsa_indexer_k_norm_epsilon"] == 1e-6


def test_types_of_layers_overrule_the_number_of_dense_ones() -> None:
    layers = {"num_hidden_layers": 3, "first_k_dense_replace": 2}
    assert V32.fields_of(sizes_of(V32) | layers)["moe_layer_freq"] == [0, 0, 1]
    assert V32.fields_of(sizes_of(V32) | layers | {"mlp_layer_types": ["sparse"] * 3})["moe_layer_freq"] == 1
    fields = V32.fields_of(sizes_of(V32) | layers | {"mlp_layer_types": ["sparse", "dense", "sparse"]})
    assert fields["moe_layer_freq"] == [1, 0, 1]
