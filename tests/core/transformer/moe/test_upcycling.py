"""Experts made of a dense checkpoint compute what the dense model does, in float64.

`tests/training/test_upcycling.py` has runs on several ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import tiny_config, tiny_gpt

from megatron.core.dist_checkpointing.chunk import model_chunks
from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.writing import save
from megatron.core.initializers import Normal, XavierUniform
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.upcycling import EqualRows, dense_chunks, enlarge_second_products

GATED = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}


def build(**settings: Any) -> GPTModel:
    config = tiny_config(num_attention_heads=2, ffn_hidden_size=24, init_method_std=0.3, **settings)
    return tiny_gpt(config, 31, 8, position_embedding_type="rope")


@pytest.mark.parametrize(
    ("dense", "experts", "parts"),
    [
        (GATED, {"num_moe_experts": 4, "moe_router_topk": 2}, 1),
        ({}, {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True}, 1),
        (GATED, {"num_moe_experts": 8, "moe_router_topk": 4, "moe_ffn_hidden_size": 12, "moe_grouped_gemm": True}, 2),
        ({}, {"num_moe_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 8, "moe_layer_freq": [0, 1]}, 3),
    ],
    ids=["copies", "grouped copies with biases", "halves, gated", "thirds with biases, one dense layer"],
)
def test_the_model_computes_what_the_dense_one_does(
    dense: dict[str, Any], experts: dict[str, Any], parts: int, tmp_path: Path
) -> None:
    first = build(**dense)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    save(tmp_path, model_chunks(first, lambda info: ()), step=3, common={}, config={}, layout={})
    model = build(**dense, **experts, moe_use_upcycling=True, moe_upcycling_granularity=parts, seed=5)
    chunks = list(model_chunks(model, lambda info: ()))
    assert load(tmp_path, dense_chunks(chunks, parts)) is not None
    enlarge_second_products(chunks, parts)
    ids = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(ids), first(ids), rtol=1e-12, atol=1e-12)
    router = model.decoder.layers[1].mlp.router
    assert router.weight[::parts].unique(dim=0).shape[0] == len(router.weight) // parts  # groups differ


def test_ranges_of_experts_that_a_rank_holds() -> None:
    model = build(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=12, moe_grouped_gemm=True)
    (whole,) = [c for c in model_chunks(model, lambda info: ()) if c.name.endswith("0.mlp.experts.linear_fc2.weight")]
    assert whole.global_shape == (4, 16, 12)
    found = list(dense_chunks([whole.part(100, 500)], 2))
    assert [(chunk.box.start, chunk.flat_range) for chunk in found] == [
        ((0, 0), (100, 192)),
        ((0, 12), (0, 192)),
        ((0, 0), (0, 116)),
    ]
    assert {chunk.name for chunk in found} == {"decoder.layers.0.mlp.linear_fc2.weight"}
    assert {chunk.global_shape for chunk in found} == {(16, 24)}


@pytest.mark.parametrize("init", [Normal(0.5), XavierUniform()])
def test_rows_of_a_group_are_equal(init: Any) -> None:
    equal = EqualRows(init, 2)
    drawn = equal(torch.empty(6, 4))
    assert torch.equal(drawn[::2], drawn[1::2]) and drawn[::2].unique(dim=0).shape[0] == 3
