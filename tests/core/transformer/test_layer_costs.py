"""Costs of layers, the FLOP count of the log, and the layout that `auto` becomes."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config, tiny_gpt
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.models.bert.bert_layer_specs import get_bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.core.ops.activation import squared_relu
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.layer_costs import (
    decoder_layer_cost,
    encoder_layer_cost,
    flops_per_token,
    layer_cost,
    stages_of_auto_layout,
    training_flops,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


def config(layers: int, stages: int, **fields: Any) -> TransformerConfig:
    given = {"pipeline_model_parallel_size": stages, "pipeline_model_parallel_layout": "auto", **fields}
    return tiny_config(num_layers=layers, hidden_size=64, fp64=False, **given)


def resolved(config: TransformerConfig, seq_length: int, vocab_size: int) -> TransformerConfig:
    stages = stages_of_auto_layout(config, seq_length, vocab_size)
    return dataclasses.replace(config, pipeline_model_parallel_layout=stages)


def test_a_head_that_costs_as_much_as_layers_takes_their_place() -> None:
    made = config(14, 4)
    vocabulary = layer_cost(made, 1, 128) // 64 * 2  # a head of two layers
    with_stages = resolved(made, 128, vocabulary)
    assert [len(stage.layers) for stage in stage_map(with_stages).stages] == [4, 4, 4, 2]
    assert stages_of_auto_layout(with_stages, 4096, 10) is None


@pytest.mark.parametrize("fields", [{"virtual_pipeline_model_parallel_size": 2}, {"pipeline_schedule": "zb-v"}])
def test_it_cuts_for_as_many_chunks_as_are_asked_for(fields: dict[str, Any]) -> None:
    made = config(15, 2, **fields)
    stages = stage_map(resolved(made, 128, layer_cost(made, 1, 128) // 64))
    assert stages.chunks == 2 and [len(stage.layers) for stage in stages.stages] == [4, 4, 4, 3]


def test_windows_make_layers_cheaper() -> None:
    """Layers 1, 2, 4, 5 see 16 keys, layers 3 and 6 all 4096."""
    made = config(6, 2, window_size=(15, 0), window_attn_skip_freq=3)
    costs = [layer_cost(made, number, 4096) for number in range(1, 7)]
    assert costs[0] == costs[1] == costs[3] < costs[2] == costs[5]


EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_layer_freq": [0, 1],
}
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"num_query_groups": 2, "ffn_hidden_size": 96},
    "grouped, a gated MLP": {"num_query_groups": 2, "ffn_hidden_size": 96, "gated_linear_unit": True},
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
    made = tiny_config(
        MLATransformerConfig if is_latent else TransformerConfig,
        hidden_size=64,
        add_bias_linear=False,
        attention_backend=AttnBackend.unfused,
        normalization="RMSNorm",
        **fields,
    )
    s, vocabulary, depths = 32, 50, made.mtp_num_layers or 0
    model = tiny_gpt(made, vocabulary, s, position_embedding_type="rope")
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
    made = resolved(made, 128, vocabulary)
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


# Megatron-LM's count ------------------------------------------------------------------------------------------------

GPT = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 32, "num_attention_heads": 4}


def per_token(**fields: Any) -> float:
    """Returns the FLOPs for 128 rows of vocabulary and sequences of 16 tokens."""
    kind = MLATransformerConfig if "kv_lora_rank" in fields else TransformerConfig
    return flops_per_token(kind(**{**GPT, **fields}), 128, 16)


def test_dense_by_hand() -> None:
    mlp = 6 * 8 * 32 * 2 * 2
    attention = 6 * (8 * 24 + 8 * 16 + 8 * 8) * 2
    assert per_token() == mlp + attention + 6 * 8 * 128
    assert training_flops(TransformerConfig(**GPT), 128, 16, 5) == 5 * 16 * (mlp + attention + 6 * 8 * 128)
    assert per_token(window_size=(3, 0)) == per_token()  # half of the square, also with a window


def test_gated_grouped_and_output_gate_by_hand() -> None:
    mlp = 6 * 8 * 32 * 3 * 2
    attention = 6 * (8 * (8 + 4 + 4 + 8) + 8 * 16 + 8 * 8) * 2
    found = per_token(num_query_groups=2, gated_linear_unit=True, attention_output_gate=True)
    assert found == mlp + attention + 6 * 8 * 128


def test_experts_and_mtp_by_hand() -> None:
    """Layer 2 and the predicting one, which is as the last, have experts; the router is not counted."""
    experts = {"num_moe_experts": 8, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 16, "moe_router_topk": 3}
    found = per_token(mtp_num_layers=1, moe_shared_expert_intermediate_size=20, **experts)
    mlp = 6 * 8 * (32 * 2 * 1 + (16 * 3 * 2 + 20 * 2) * 2)
    attention = 6 * (8 * 24 + 8 * 16 + 8 * 8) * 3
    mtp = 6 * (3 * 8 + 2 * 64)
    assert found == mlp + attention + mtp + 6 * 8 * 128 * 2


def test_gated_delta_nets_by_hand() -> None:
    """Layer 1 of two has projections of queries, keys (3 heads of 5), values, gates and outputs (6 heads of 7), two
    numbers for each value head, a convolution over 4 tokens, and four passes over the states."""
    sizes = {
        "linear_num_key_heads": 3,
        "linear_key_head_dim": 5,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 7,
    }
    found = per_token(experimental_attention_variant="gated_delta_net", linear_attention_freq=2, **sizes)
    delta = 8 * (2 * 15 + 3 * 42 + 2 * 6) + 4 * (2 * 15 + 42) + 4 * 6 * 5 * 7
    attention = 8 * 24 + 8 * 16 / 2 + 8 * 16 / 2 + 8 * 8
    assert found == 6 * (8 * 32 * 2 * 2 + delta + attention + 8 * 128)


def test_sparse_attention_by_hand() -> None:
    """The indexer (2 heads of 3 channels) reads latents of 3 numbers and hidden states of 8, and scores all keys;
    attention reads 4 of them."""
    sizes = {"q_lora_rank": 3, "kv_lora_rank": 5, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 3}
    sparse = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 3, "dsa_indexer_topk": 4}
    config = tiny_config(MLATransformerConfig, hidden_size=8, experimental_attention_variant="dsa", **sizes, **sparse)
    dense = dataclasses.replace(config, experimental_attention_variant=None)
    indexer = 3 * 6 + 8 * (3 + 2) + 2 * (3 + 1) * 10
    fewer = 4 * (4 + 2 + 3) * (10 - 4)
    found, plain = (layer_cost(one, 1, 19, bidirectional=False) for one in (config, dense))
    assert found - plain == indexer - fewer


@pytest.mark.parametrize(("q_lora_rank", "queries"), [(None, 8 * 4 * 6), (3, 3 * (8 + 4 * 6 + 1))])
def test_latent_attention_by_hand(q_lora_rank: int | None, queries: int) -> None:
    sizes = {"q_lora_rank": q_lora_rank, "kv_lora_rank": 5, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 3}
    attention = 6 * (queries + 5 * (8 + 4 * 7 + 1) + 8 * 2 + 4 * 3 * 8 + 16 * 4 * 6 / 2 + 16 * 4 * 3 / 2)
    assert per_token(**sizes) == 6 * 8 * 32 * 2 * 2 + 2 * attention + 6 * 8 * 128


MODELS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa, swiglu": {"num_query_groups": 2, "gated_linear_unit": True},
    "wide heads, squared relu": {"kv_channels": 24, "activation_func": squared_relu},
    "mqa, swiglu, no bias": {"num_query_groups": 1, "gated_linear_unit": True, "add_bias_linear": False},
    "latent attention": {**LATENT, "q_lora_rank": 40, "qk_layernorm": True, "gated_linear_unit": True},
    "latent attention, queries at once": {**LATENT, "q_lora_rank": None},
}


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS.keys())
def test_megatron_lms_count_is_what_a_model_computes(fields: dict[str, Any]) -> None:
    """Within 1% of torch's counter. Attention is unfused, and half of its two products of scores counts. The vocabulary
    is padded."""
    vocab, padded, seq, batch = 300, 384, 32, 2
    is_latent = "kv_lora_rank" in fields
    config = tiny_config(
        MLATransformerConfig if is_latent else TransformerConfig,
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=160,
        attention_backend=AttnBackend.unfused,
        **fields,
    )
    gpt = tiny_gpt(config, vocab, seq, position_embedding_type="rope", vocab_padding_multiple=128)
    tokens = torch.randint(vocab, (batch, seq))
    with FlopCounterMode(display=False) as counter:
        gpt(tokens, labels=tokens).mean().backward()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    scores = sum(flops for op, flops in counts.items() if "bmm" in op)
    widths = (config.kv_channels, config.kv_channels)
    if is_latent:
        widths = (config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim)
    products = sum(widths) * config.num_attention_heads * seq * seq
    assert scores == 3 * 2 * products * batch * config.num_layers  # only attention is batched
    counted = sum(counts.values()) - scores / 2
    formula = training_flops(config, padded, seq, batch)
    assert formula == pytest.approx(counted, rel=0.01)


def test_the_count_of_a_bert_is_what_it_computes() -> None:
    """All keys, and the transform before the head; pooler and binary head, a token of each row, are left out."""
    config = tiny_config(num_layers=3, hidden_size=64, attention_backend=AttnBackend.unfused)
    bert = BertModel(config, 2, get_bert_layer_local_spec(), 300, 32)
    tokens = torch.randint(300, (2, 32))
    with FlopCounterMode(display=False) as counter:
        losses, in_order = bert(tokens, torch.ones_like(tokens), torch.zeros_like(tokens), lm_labels=tokens)
        (losses.mean() + in_order.mean()).backward()
    assert training_flops(config, 300, 32, 2, bidirectional=True) == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert layer_cost(config, 1, 32, bidirectional=True) - layer_cost(config, 1, 32) == 2 * 64 * (32 - 16)


# An encoder and a decoder --------------------------------------------------------------------------------------------


def test_the_count_of_a_t5_is_what_it_computes() -> None:
    """The costs are within 1% of torch's counter, if scores among the decoder's own tokens count half."""
    read, written, batch = 24, 16, 2
    made = tiny_config(num_layers=3, num_encoder_layers=2, hidden_size=64, attention_backend=AttnBackend.unfused)
    encoder = copy.copy(made)
    encoder.num_layers = 2
    specs = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(3)
    t5 = T5Model(made, encoder, *specs, 300, read, vocab_padding_multiple=4)
    ids = torch.randint(300, (batch, read))
    with FlopCounterMode(display=False) as counter:
        t5(ids, ids[:, :written], lm_labels=ids[:, :written]).mean().backward()
    halved = 6 * batch * 3 * 2 * 64 * written * written  # both products of causal scores, forward and backward
    formula = training_flops(made, 300, read, batch, decoder_seq_length=written)
    assert formula == pytest.approx(counter.get_total_flops() - halved / 2, rel=0.01)


def two_stacks(stages: int, encoder: int = 8, decoder: int = 8, **fields: Any) -> TransformerConfig:
    return config(decoder, stages, num_encoder_layers=encoder, pipeline_dtype=torch.float32, **fields)


def layers_of(made: TransformerConfig, read: int, written: int, vocabulary: int) -> list[tuple[int, int]]:
    stages = stages_of_auto_layout(made, read, vocabulary, written)
    found = stage_map(dataclasses.replace(made, pipeline_model_parallel_layout=stages)).stages
    return [(len(stage.encoder_layers), len(stage.layers)) for stage in found]


def test_the_stack_with_the_longer_rows_gets_more_ranks() -> None:
    assert layers_of(two_stacks(4), 512, 64, 10) == [(2, 0), (3, 0), (3, 0), (0, 8)]
    assert layers_of(two_stacks(4), 64, 512, 10) == [(8, 0), (0, 3), (0, 3), (0, 2)]


def test_a_given_split_is_kept_and_balanced() -> None:
    made = two_stacks(4, pipeline_model_parallel_split_rank=2)
    assert [sum(pair) for pair in layers_of(made, 512, 64, 10)] == [4, 4, 4, 4]


def test_cross_attention_costs_queries_keys_and_scores() -> None:
    made = config(4, 1)
    cross = decoder_layer_cost(made, 1, 10, 6) - 6 * layer_cost(made, 1, 6)
    assert cross == 2 * 64 * 64 * (10 + 6) + 2 * 64 * 10 * 6
    assert encoder_layer_cost(made, 10) == 10 * layer_cost(made, 1, 10, bidirectional=True)
