"""The layout that `auto` becomes."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.stage_costs import layer_cost, resolve_auto_layout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


def config(layers: int, stages: int, **fields: Any) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": layers,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "pipeline_model_parallel_size": stages,
            "pipeline_model_parallel_layout": "auto",
            **fields,
        }
    )


def test_a_head_that_costs_as_much_as_layers_takes_their_place() -> None:
    made = config(14, 4)
    vocabulary = layer_cost(made, 1, 128) // 64 * 2  # a head of two layers
    resolve_auto_layout(made, 128, vocabulary)
    assert [len(stage.layers) for stage in stage_map(made).stages] == [4, 4, 4, 2]
    before = made.pipeline_model_parallel_layout
    resolve_auto_layout(made, 4096, 10)  # settled once
    assert made.pipeline_model_parallel_layout == before


@pytest.mark.parametrize("fields", [{"virtual_pipeline_model_parallel_size": 2}, {"pipeline_schedule": "zb-v"}])
def test_it_cuts_for_as_many_chunks_as_are_asked_for(fields: dict[str, Any]) -> None:
    made = config(15, 2, **fields)
    resolve_auto_layout(made, 128, layer_cost(made, 1, 128) // 64)
    stages = stage_map(made)
    assert stages.chunks == 2 and [len(stage.layers) for stage in stages.stages] == [4, 4, 4, 3]


def test_windows_make_layers_cheaper() -> None:
    """Layers 1, 2, 4, 5 see 16 keys, layers 3 and 6 all 4096."""
    made = config(6, 2, window_size=(15, 0), window_attn_skip_freq=3)
    costs = [layer_cost(made, number, 4096) for number in range(1, 7)]
    assert costs[0] == costs[1] == costs[3] < costs[2] == costs[5]
    resolve_auto_layout(config(6, 2), 4096, 10)


@pytest.mark.parametrize("gated", [False, True])
def test_costs_are_those_of_the_products(gated: bool) -> None:
    """Against torch's own count of a layer's products; scores are counted at what is seen of the square."""
    made = config(1, 1, gated_linear_unit=gated, num_query_groups=2, ffn_hidden_size=96)
    s, h, d = 32, 64, 16
    with FlopCounterMode(display=False) as counter:
        x = torch.ones(s, h)
        x @ torch.ones(h, 4 * d + 2 * 2 * d)
        scores = torch.ones(4, s, d) @ torch.ones(4, d, s)
        scores @ torch.ones(4, s, d)
        torch.ones(s, 4 * d) @ torch.ones(4 * d, h)
        torch.ones(s, h) @ torch.ones(h, (2 if gated else 1) * 96)
        torch.ones(s, 96) @ torch.ones(96, h)
    whole = counter.get_total_flops() / 2 / s  # multiplications a token, the whole square of scores
    of_scores = 2 * 4 * d * s
    assert layer_cost(made, 1, s) == pytest.approx(whole - of_scores + 2 * 4 * d * ((s + 1) // 2))


EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_layer_freq": [0, 1],
}
KINDS: dict[str, dict[str, Any]] = {
    "experts": EXPERTS,
    "experts and shared ones": {**EXPERTS, "moe_shared_expert_intermediate_size": 80, "gated_linear_unit": True},
    "experts of a latent": {**EXPERTS, "moe_latent_size": 32},
    "latent attention": {"multi_latent_attention": True, "q_lora_rank": None},
    "latent attention and queries": {"multi_latent_attention": True, "q_lora_rank": 24},
    "predicting": {"mtp_num_layers": 2},
    "predicting with experts": {"mtp_num_layers": 1, **EXPERTS},
}
LATENT: dict[str, Any] = {"kv_lora_rank": 20, "qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 10}


@pytest.mark.parametrize("kind", KINDS)
def test_costs_of_all_kinds_of_layers_are_what_a_model_computes(kind: str) -> None:
    """Against torch's count of a model's forward, in which scores are whole squares."""
    is_latent = "multi_latent_attention" in KINDS[kind]
    fields = {**KINDS[kind], **(LATENT if is_latent else {})}
    made = (MLATransformerConfig if is_latent else TransformerConfig)(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        add_bias_linear=False,
        attention_backend=AttnBackend.unfused,
        normalization="RMSNorm",
        **fields,
    )
    s, vocabulary, depths = 32, 50, made.mtp_num_layers or 0
    spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False)
    further = get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False)
    model = GPTModel(made, spec, vocabulary, s, position_embedding_type="rope", mtp_block_spec=further)
    ids = torch.randint(vocabulary, (1, s))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids)
    layers = range(1, 3 + depths)
    costs = sum(layer_cost(made, number, s) for number in layers) + 64 * vocabulary * (1 + depths) + 2 * 64**2 * depths
    width = 20 + 10 if is_latent else 2 * 16
    unseen = len(layers) * 4 * width * (s - (s + 1) // 2)
    assert counter.get_total_flops() / 2 / s == costs + unseen


def test_a_stage_that_predicts_further_has_fewer_layers() -> None:
    made = config(12, 4, mtp_num_layers=2)
    vocabulary = layer_cost(made, 1, 128) // 64 // 2  # three heads of half a layer each, two layers and a little more
    resolve_auto_layout(made, 128, vocabulary)
    parts = stage_map(made).stages
    assert [len(part.layers) for part in parts] == [4, 4, 4, 0] and parts[-1].prediction_layers == 2
    assert made.pipeline_model_parallel_layout.endswith("|mmL")


def test_chunks_make_layers_cheaper_by_the_pairs_that_do_not_meet() -> None:
    def scores(**fields: Any) -> int:
        return (layer_cost(config(4, 2, **fields), 1, 10) - layer_cost(config(4, 2), 1, 10)) // (2 * 64)

    whole = 10 * 11 // 2 // 10
    assert scores(attention_chunk_size=4) == (2 * 10 + 3) // 10 - whole
    assert scores(attention_chunk_size=4, window_size=(1, 0)) == (2 * 7 + 3) // 10 - whole
    assert scores(attention_chunk_size=20) == 0 == scores(attention_chunk_size=4, attention_chunk_skip_freq=1)
