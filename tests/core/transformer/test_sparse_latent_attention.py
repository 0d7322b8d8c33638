"""DeepSeek sparse attention: against `transformers`, with packed documents, and what is refused.

`tests/parity` compares layouts with one process, `tests/core/ops/attention/test_indexer.py` the loss with its formula,
`tests/core/inference` writes with a cache.
"""

from typing import Any

import pytest
import torch
from core.models.test_model_options_against_transformers import NothingNarrower
from support.exact_gradients import assert_equal, gradients, recomputing
from support.processes import run_on_ranks
from support.tiny_models import randomize, tiny_config, tiny_gpt
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

from megatron.core.context_parallel import cut_rows, sequence_part
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.ops.rope import Rotation
from megatron.core.tokens import Tokens
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.layer_metrics import take_layer_metrics
from megatron.core.transformer.transformer_config import MLATransformerConfig

VOCABULARY, LENGTH = 37, 12
LATENT = {"kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5, "q_lora_rank": 8}
INDEXER = {"dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 6, "dsa_indexer_topk": 4}


def config_of(**settings: Any) -> MLATransformerConfig:
    plain = {"ffn_hidden_size": 24, "add_bias_linear": False}
    variant = {"experimental_attention_variant": "dsa", "qk_layernorm": True, "rope_type": "rope"}
    return tiny_config(MLATransformerConfig, **{**plain, **LATENT, **INDEXER, **variant, **settings})


def build(groups: ProcessGroupCollection | None = None, **settings: Any) -> GPTModel:
    config = config_of(**settings)
    model = tiny_gpt(config, VOCABULARY, LENGTH, position_embedding_type="rope", pg_collection=groups)
    randomize(model)
    return model


def tokens_of(rows: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def test_agrees_with_transformers() -> None:
    # So many heads that no two scores are 0: their choice among equal scores has no rule.
    ours = build(layernorm_epsilon=1e-6, dsa_indexer_n_heads=12).decoder.layers[0].self_attention
    theirs_config = DeepseekV32Config(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        index_n_heads=12,
        index_head_dim=6,
        index_topk=4,
    )
    theirs_config._attn_implementation = "eager"
    theirs = DeepseekV32Attention(theirs_config, 0).double()
    names = {
        "q_a_proj": "linear_q_down_proj",
        "q_a_layernorm": "q_layernorm",
        "q_b_proj": "linear_q_up_proj",
        "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_a_layernorm": "kv_layernorm",
        "kv_b_proj": "linear_kv_up_proj",
        "o_proj": "linear_proj",
        "indexer.wq_b": "indexer.linear_wq_b",
        "indexer.wk": "indexer.linear_wk",
        "indexer.k_norm": "indexer.k_norm",
        "indexer.weights_proj": "indexer.linear_weights_proj",
    }
    values = ours.state_dict()
    source = {
        name: values[f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}"] for name in theirs.state_dict()
    }
    theirs.load_state_dict(source)
    hidden = torch.randn(2, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    angles = torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.01])
    cos, sin = angles.cos().double(), angles.sin().double()
    mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=torch.float64).triu(1)[None, None].expand(2, 1, -1, -1)
    with NothingNarrower():
        expected, _ = theirs(hidden, tuple(torch.cat([one, one], -1)[None] for one in (cos, sin)), mask)
    rotation = Rotation(cos[:, None, None], sin[:, None, None], interleaved=True)
    found, _ = ours.eval()(hidden.transpose(0, 1).flatten(0, 1), LayerInputs(Tokens(LENGTH, 2), rotation))
    torch.testing.assert_close(found.view(LENGTH, 2, 16).transpose(0, 1), expected, rtol=1e-11, atol=1e-12)


def test_all_keys_selected_is_latent_attention() -> None:
    sparse, dense = build(dsa_indexer_topk=LENGTH), build(experimental_attention_variant=None)
    dense.load_state_dict({name: value for name, value in sparse.state_dict().items() if "indexer" not in name})
    ids = tokens_of(2)
    assert torch.equal(sparse(ids), dense(ids))
    assert (build(dsa_indexer_topk=2)(ids) - dense(ids)).abs().max() > 1e-2


@pytest.mark.parametrize("sparse", [False, True])
def test_only_the_indexers_loss_trains_the_indexer(sparse: bool) -> None:
    settings = {"dsa_indexer_loss_coeff": 0.5, "dsa_indexer_use_sparse_loss": sparse}
    with_loss, without = build(**settings), build()
    ids = tokens_of(2)
    for model in (with_loss, without):
        model(ids, labels=ids).sum().backward()
    plain = dict(without.named_parameters())
    for name, parameter in with_loss.named_parameters():
        if "indexer" in name:
            assert parameter.grad.abs().max() > 0 and not plain[name].requires_grad, name
        else:
            torch.testing.assert_close(parameter.grad, plain[name].grad, rtol=1e-12, atol=1e-14)
    metrics = take_layer_metrics([with_loss])
    assert [(metric.name, metric.layer) for metric in metrics] == [("indexer_loss", 1), ("indexer_loss", 2)]
    assert all(metric.total / metric.count > 0 for metric in metrics)


def test_the_loss_teaches_the_indexer_attentions_choice() -> None:
    model = build(num_layers=1, dsa_indexer_loss_coeff=1.0)
    indexer = [parameter for name, parameter in model.named_parameters() if "indexer" in name]
    optimizer, ids, seen = torch.optim.Adam(indexer, lr=0.02), tokens_of(2), []
    for _ in range(15):
        optimizer.zero_grad()
        model(ids, labels=ids).sum().backward()
        optimizer.step()
        (metric,) = take_layer_metrics([model])
        seen.append((metric.total / metric.count).item())
    assert seen[-1] < 0.6 * seen[0]


def test_packed_documents_do_not_see_each_other() -> None:
    model, ids = build(), tokens_of(1)
    borders = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    packed = model(ids, tokens=Tokens(LENGTH, 1, cu_seqlens=borders, max_seqlen=6))
    alone = torch.cat([model(part) for part in ids.split([5, 1, 6], 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-11, atol=1e-11)


def test_recompute_changes_no_bit() -> None:
    chosen = recomputing("core_attn", "layernorm", "mla_up_proj")
    plain, recomputed = build(dsa_indexer_loss_coeff=0.5), build(dsa_indexer_loss_coeff=0.5, **chosen)
    assert_equal(gradients(recomputed), gradients(plain))


def test_rows_hide_keys_from_the_indexer_too() -> None:
    model, ids = build(), tokens_of(1)
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[..., 6:, :6] = True  # as two documents
    alone = model(ids[:, 6:], torch.arange(6, LENGTH)[None])
    torch.testing.assert_close(model(ids, None, mask)[:, 6:], alone, rtol=1e-6, atol=1e-6)  # angles are float32
    with pytest.raises(UserError, match="dsa selects keys for all heads"):
        model(ids, None, mask.expand(1, 4, -1, -1))


def test_what_cannot_be_selected_is_refused() -> None:
    config = config_of()
    with pytest.raises(UserError, match="dsa selects among earlier keys"):
        gpt_layer_spec_of(config, 1, AttnMaskType.padding)


def test_options_of_the_indexer() -> None:
    ids, plain = tokens_of(2), build(dsa_indexer_topk=2)
    for option in (
        {"dsa_indexer_scoring_relu": False},
        {"dsa_indexer_rope_interleaved": True},
        {"dsa_indexer_k_norm_epsilon": 1.0},
    ):
        other = build(dsa_indexer_topk=2, **option)
        assert (other(ids) - plain(ids)).abs().max() > 1e-3, option


MASK = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)).gt(0.6).tril(-1)
"""Hides some earlier keys, and never the query's own."""


def losses_and_gradients(
    groups: ProcessGroupCollection, case: str, mask: torch.Tensor | None, borders: list[int] | None, **loss: Any
) -> list[torch.Tensor]:
    """Returns the losses of a row's tokens, or of this rank's part of it, and the gradients of their sum."""
    model, ids, part = build(groups, **loss, calculate_per_token_loss=True), tokens_of(1), sequence_part(groups)
    if part is not None:
        ids = cut_rows(ids, part, 1)
        mask = cut_rows(mask, part, 2) if mask is not None and case == "mask of its queries" else mask
    facts = {"cu_seqlens": torch.tensor(borders, dtype=torch.int32), "max_seqlen": 6} if borders else {}
    losses = model(ids, None, mask, labels=ids, tokens=Tokens(ids.shape[1], 1, part, **facts))
    losses.sum().backward()
    return [losses.detach(), *(parameter.grad for parameter in model.parameters())]


def agrees_with_whole_rows(case: str, mask: torch.Tensor | None, borders: list[int] | None, sparse: bool) -> None:
    one, groups = (
        ProcessGroupCollection.from_grid(RankGrid(2, context=ranks), torch.distributed.get_rank()) for ranks in (1, 2)
    )
    loss = {"dsa_indexer_loss_coeff": 0.5, "dsa_indexer_use_sparse_loss": sparse, "dsa_indexer_n_heads": 12}
    expected, *whole = losses_and_gradients(one, case, mask, borders, **loss)
    for way in ("p2p", "a2a"):
        found, *parts = losses_and_gradients(groups, case, mask, borders, **loss, cp_comm_type=way)
        part = sequence_part(groups)
        assert part is not None
        torch.testing.assert_close(found, cut_rows(expected, part, 1), rtol=1e-11, atol=1e-11)
        for ours, gradient in zip(parts, whole, strict=True):
            torch.distributed.all_reduce(ours, group=groups.cp)
            torch.testing.assert_close(ours, gradient, rtol=1e-10, atol=1e-11)


def all_cases_agree() -> None:
    agrees_with_whole_rows("mask of whole rows", MASK, None, sparse=True)
    agrees_with_whole_rows("mask of its queries", MASK, None, sparse=False)
    agrees_with_whole_rows("documents", None, [0, 5, 6, 12], sparse=True)


@pytest.mark.slow
def test_split_rows_are_whole_rows() -> None:
    run_on_ranks(all_cases_agree, 2)
