"""BERT: names of its parameters, padding, stages, and what it refuses."""

from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.bert import BertModel
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec, bert_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH = 6


def config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, fp64=True, **settings)


def bert(settings: TransformerConfig | None = None, spec: Any = bert_layer_local_spec, **options: Any) -> BertModel:
    return BertModel(settings or config(), options.pop("num_tokentypes", 2), spec, 11, LENGTH, **options)


def test_names_are_those_of_megatron_lm() -> None:
    layer = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    modules = {
        f"encoder.layers.{n}.{part}" for n in (0, 1) for part in (*layer, "input_layernorm", "pre_mlp_layernorm")
    }
    modules |= {"encoder.final_layernorm", "lm_head.dense", "lm_head.layer_norm", "pooler.dense", "binary_head"}
    expected = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    expected |= {f"embedding.{name}_embeddings.weight" for name in ("word", "position", "tokentype")}
    expected |= {"output_layer.weight", "output_layer.bias"}
    shapes = {name: tuple(p.shape) for name, p in bert().named_parameters()}
    assert shapes.keys() == expected
    assert shapes["embedding.tokentype_embeddings.weight"] == shapes["binary_head.weight"] == (2, 16)
    assert shapes["output_layer.bias"] == (11,) and shapes["lm_head.dense.weight"] == (16, 16)
    tied = {name for name, _ in bert(share_embeddings_and_output_weights=True).named_parameters()}
    assert expected - tied == {"output_layer.weight"}
    plain = {name for name, _ in bert(num_tokentypes=0, add_binary_head=False).named_parameters()}
    assert expected - plain == {"embedding.tokentype_embeddings.weight"} | {
        name for name in expected if name.startswith(("pooler", "binary_head"))
    }


def test_padding_and_the_tokens_behind_it_change_nothing() -> None:
    model = bert(spec=bert_layer_with_transformer_engine_spec).eval()
    ids = torch.randint(0, 11, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    types = torch.zeros_like(ids)
    logits, in_order = model(ids, mask, types)
    changed, changed_order = model(torch.where(mask.bool(), ids, 10 - ids), mask, types)
    assert torch.equal(changed[mask.bool()], logits[mask.bool()]) and torch.equal(changed_order, in_order)
    seen, _ = model(ids, None, types)
    assert (seen - logits)[1, :3].abs().min() > 1e-9  # without the mask they are read
    assert torch.equal(model.bert_position_ids(ids)[1], torch.arange(LENGTH))


def test_embeddings_of_rows_are_means_without_the_ends() -> None:
    model = bert(return_embeddings=True).eval()
    ids = torch.randint(0, 11, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    hidden: list[torch.Tensor] = []
    model.encoder.register_forward_hook(lambda module, args, output: hidden.append(output))
    found = model(ids, mask, torch.zeros_like(ids))
    states = hidden[0].transpose(0, 1)
    torch.testing.assert_close(found[:2], torch.stack([states[0, 1:5].mean(0), states[1, 1:3].mean(0)]))
    assert found.dtype == torch.float64 and not found[2].any()
    whole = model(ids, None, torch.zeros_like(ids))
    torch.testing.assert_close(whole, hidden[1][1:5].mean(0))


def test_losses_are_those_of_the_logits_and_unmasked_labels_do_no_harm() -> None:
    model = bert().eval()
    ids = torch.arange(LENGTH).expand(2, -1)
    labels = torch.tensor([[-1, 3, -1, 10, 0, -1]] * 2)
    losses, _ = model(ids, torch.ones_like(ids), torch.zeros_like(ids), lm_labels=labels)
    logits, _ = model(ids, torch.ones_like(ids), torch.zeros_like(ids))
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-1, reduction="none")
    real = labels >= 0
    assert (losses - expected)[real].abs().max() < 1e-12 and losses.isfinite().all()


def test_a_stage_hands_hidden_states_on() -> None:
    settings = config(pipeline_model_parallel_size=2)
    ids = torch.arange(LENGTH).expand(2, -1)
    whole = bert().eval()
    hidden = None
    for rank in (0, 1):
        groups = ProcessGroupCollection.from_grid(RankGrid(2, pipeline=2), rank)
        place = {"pre_process": rank == 0, "post_process": rank == 1, "pg_collection": groups}
        stage = bert(settings, **place).eval()
        stage.set_input_tensor(hidden)
        hidden = stage(ids, torch.ones_like(ids), torch.zeros_like(ids))
        assert (stage.shared_embedding_or_output_weight() is not None) and hasattr(stage, "pooler") == (rank == 1)
    for found, expected in zip(hidden, whole(ids, None, torch.zeros_like(ids)), strict=True):
        assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"position_embedding_type": "alibi"}, "position_embedding_type alibi: not for BERT; learned_absolute"),
        ({"settings": config(mtp_num_layers=1)}, "mtp_num_layers 1: BERT predicts masked tokens only"),
        (
            {"pg_collection": ProcessGroupCollection.from_grid(RankGrid(2, context=2), 0)},
            "not yet: context_parallel_size 2 with BERT",
        ),
    ],
)
def test_refusals_name_what_is_asked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        bert(**options)
    with pytest.raises(UserError, match="does not decode"):
        bert()(None, None, inference_context=object())  # type: ignore[arg-type]
