"""The layout that `auto` becomes."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.pipeline_parallel.stages import stage_map
from megatron.core.transformer.stage_costs import layer_cost, settle_layout
from megatron.core.transformer.transformer_config import TransformerConfig


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
    settle_layout(made, 128, vocabulary)
    assert [len(part.layers) for part in stage_map(made).parts] == [4, 4, 4, 2]
    before = made.pipeline_model_parallel_layout
    settle_layout(made, 4096, 10)  # settled once
    assert made.pipeline_model_parallel_layout == before


@pytest.mark.parametrize("fields", [{"virtual_pipeline_model_parallel_size": 2}, {"pipeline_schedule": "zb-v"}])
def test_it_cuts_for_as_many_chunks_as_are_asked_for(fields: dict[str, Any]) -> None:
    made = config(15, 2, **fields)
    settle_layout(made, 128, layer_cost(made, 1, 128) // 64)
    stages = stage_map(made)
    assert stages.chunks == 2 and [len(part.layers) for part in stages.parts] == [4, 4, 4, 3]


def test_windows_make_layers_cheaper() -> None:
    """Layers 1, 2, 4, 5 see 16 keys, layers 3 and 6 all 4096."""
    made = config(6, 2, window_size=(15, 0), window_attn_skip_freq=3)
    costs = [layer_cost(made, number, 4096) for number in range(1, 7)]
    assert costs[0] == costs[1] == costs[3] < costs[2] == costs[5]
    settle_layout(config(6, 2), 4096, 10)


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
