"""Layers that predict several tokens ahead, against a model that is written out plainly, in float64."""

import functools
from typing import Any

import pytest
import torch
from support.predicting_gpt import (
    EDGES,
    LLAMA,
    ROPE,
    ROW,
    ROWS,
    TIED,
    predicting_config,
    predicting_model,
    tokens_of,
    whole_batch,
)
from support.reference_gpt import head, reference_hidden, reference_loss, reference_predictions
from support.tiny_models import randomize
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.micro_batch import MicroBatch
from megatron.core.models.common.predictions import PredictionLoss
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.layer_metrics import LayerMetric, take_layer_metrics
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank, roll_tensor
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

# name: (settings of the config, keywords of the model, packed)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "learned positions, tied": ({}, TIED, False),
    "learned positions, packed": ({}, {}, True),
    "llama": (LLAMA, ROPE, False),
    "llama packed, tied": (LLAMA, ROPE | TIED, True),
    "one depth, residual after the norm": (
        {"mtp_num_layers": 1, "apply_residual_connection_post_layernorm": True},
        ROPE,
        False,
    ),
    "deeper than a document, heavier": ({"mtp_num_layers": 3, "mtp_loss_scaling_factor": 0.7}, ROPE, True),
    "windows by list": ({"window_size": (4, 0), "window_attn_skip_freq": [0, 1]}, ROPE, False),
    "rope by list": ({"no_rope_freq": [1, 0]}, ROPE, False),
    "loss per token": ({"calculate_per_token_loss": True}, ROPE | TIED, False),
}


def ours(model: GPTModel, packed: bool, scale: float) -> tuple[Tensor, list[LayerMetric]]:
    """The mean loss of the next token and what is reported; gradients of all losses in the model."""
    ids, labels, mask = whole_batch(packed)
    step = MicroBatch(auxiliary_scale=torch.tensor(scale, dtype=torch.float64))
    losses = model(ids, labels=labels, loss_mask=mask, tokens=tokens_of(packed), micro_batch=step)
    loss = (losses * mask.double()).sum() / mask.double().sum()
    (loss * scale).backward()
    return loss.detach(), take_layer_metrics([model])


def plain(weights: dict[str, Tensor], config: Any, model: dict, packed: bool) -> tuple[Tensor, list, Tensor]:
    """The mean loss, (sum, count) of each depth, and the sum that gradients are of."""
    ids, labels, mask = whole_batch(packed)
    mask = mask.double()
    positions, documents = torch.arange(ROW).expand(ROWS, ROW), torch.zeros(ROWS, ROW)
    pairs = None
    if packed:
        index = torch.arange(ROW * ROWS)
        documents = torch.bucketize(index, torch.tensor(EDGES[1:]), right=True)[None]
        positions = index[None] - torch.tensor(EDGES)[documents]
        pairs = documents[:, :, None] != documents[:, None, :]
    hidden = reference_hidden(weights, config, model, ids, positions, pairs)
    loss = (reference_loss(head(hidden, weights, model), labels) * mask).sum() / mask.sum()
    further = reference_predictions(
        weights, config, model, hidden, ids, labels, mask, positions, documents, hidden_pairs=pairs
    )
    weight = config.mtp_loss_scaling_factor / config.mtp_num_layers
    per_token = config.calculate_per_token_loss
    total = loss + sum(weight * sums / (1 if per_token else count) for sums, count in further)
    return loss, further, total


@pytest.mark.parametrize("case", CASES)
def test_losses_reports_and_gradients(case: str) -> None:
    settings, keywords, packed = CASES[case]
    model = predicting_model(predicting_config(**settings), **keywords)
    randomize(model)
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.state_dict().items()}
    loss, reports = ours(model, packed, scale=3.0)
    expected, further, total = plain(weights, model.config, {"vocab_size": 37, **keywords}, packed)
    (total * 3.0).backward()
    assert abs(loss - expected) < 1e-12
    assert [report.name for report in reports] == [f"mtp_{1 + depth} loss" for depth in range(len(further))]
    assert [report.layer for report in reports] == [3 + depth for depth in range(len(further))]
    for report, (sums, count) in zip(reports, further, strict=True):
        assert abs(report.total - sums) < 1e-10 and abs(report.count - count) < 1e-10 and count > 0
    for name, parameter in model.named_parameters():
        reference = weights[name].grad
        assert (parameter.grad - reference).abs().max() < 1e-11 * reference.abs().max(), name


def test_names_and_shapes_are_megatron_lms() -> None:
    model = predicting_model(predicting_config(mtp_num_layers=1, **LLAMA), **ROPE)
    found = {name: tuple(p.shape) for name, p in model.named_parameters() if name.startswith("mtp.")}
    layer = get_parts(model.decoder.layers[0], "mtp.layers.0.transformer_layer.")
    assert found == {
        "mtp.layers.0.enorm.weight": (16,),
        "mtp.layers.0.hnorm.weight": (16,),
        "mtp.layers.0.eh_proj.weight": (16, 32),
        "mtp.layers.0.final_layernorm.weight": (16,),
        **layer,
    }
    assert all(parameter.info.name == name for name, parameter in model.named_parameters())
    assert "mtp.layers.0.eh_proj.bias" not in model.state_dict()


def get_parts(module: torch.nn.Module, prefix: str) -> dict[str, tuple[int, ...]]:
    return {prefix + name: tuple(p.shape) for name, p in module.named_parameters()}


def test_nothing_is_predicted_where_no_gradient_follows() -> None:
    """Evaluation and inference: the same losses, and no work."""
    model = predicting_model(predicting_config(), **ROPE)
    ids, labels, mask = whole_batch()
    losses = model(ids, labels=labels, loss_mask=mask).detach()
    take_layer_metrics([model])
    calls: list[int] = []
    model.mtp.register_forward_hook(lambda *unused: calls.append(1))
    with torch.no_grad():
        assert torch.equal(model(ids, labels=labels), losses)
    model.eval()
    assert torch.equal(model(ids, labels=labels), losses)
    assert model(ids).shape == (ROWS, ROW, 37)
    assert not calls and not take_layer_metrics([model])
    model.train()
    model(ids, labels=labels)
    assert calls


def test_a_mask_that_hides_all_gives_zeros() -> None:
    model = predicting_model(predicting_config(), **ROPE)
    ids, labels, mask = whole_batch()
    (model(ids, labels=labels, loss_mask=torch.zeros_like(mask)) * 0.0).sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("mask_type", [torch.bfloat16, torch.float32, torch.bool])
def test_tokens_are_counted_whatever_type_losses_have(mask_type: torch.dtype) -> None:
    """bfloat16 has no 301: neither the count nor the sum may pass through it."""
    depth = PredictionLoss(predicting_config(), 1)
    losses = torch.ones(43, 7, dtype=torch.bfloat16, requires_grad=True)
    total = depth(losses, torch.ones(43, 7, dtype=mask_type))
    total.backward()
    (report,) = take_layer_metrics([depth])
    assert (float(total.detach()), float(report.total), float(report.count)) == (301.0, 301.0, 301.0)
    assert losses.grad is not None and torch.equal(losses.grad, torch.ones_like(losses))


def test_where_the_layers_stand() -> None:
    layout = {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|tt|mm|L", "num_layers": 3}
    config = predicting_config(**layout)
    spec = get_gpt_layer_local_spec()
    built = [get_gpt_mtp_block_spec(config, spec, False, pp_rank=rank) for rank in range(4)]
    assert [found is not None for found in built] == [False, False, True, False]
    assert config.mtp_standalone
    (last, other) = (layer.submodules.transformer_layer for layer in built[2].submodules.layer_specs)
    assert last is spec and other is spec
    with pytest.raises(UserError, match=r"mtp_block_spec is missing, while mtp_num_layers 2 puts 2 layers on this"):
        GPTModel(
            config,
            spec,
            37,
            16,
            pre_process=False,
            post_process=False,
            pg_collection=ProcessGroupCollection.from_grid(RankGrid(4, pipeline=4), 2),
        )


def test_specs_of_other_numbers_of_layers_are_refused() -> None:
    config = predicting_config(mtp_num_layers=1)
    spec = get_gpt_mtp_block_spec(predicting_config(), get_gpt_layer_local_spec(), False)
    assert isinstance(spec, ModuleSpec)
    with pytest.raises(UserError, match=r"2 specs of multi-token prediction layers, mtp_num_layers is 1; make them eq"):
        GPTModel(config, get_gpt_layer_local_spec(), 37, 16, mtp_block_spec=spec)


def test_which_ranks_hold_predictions() -> None:
    config = functools.partial(TransformerConfig, num_layers=4, hidden_size=8, num_attention_heads=2)
    plain = config(pipeline_model_parallel_size=2)
    assert get_mtp_ranks([3, 7], plain) == [] and not mtp_on_this_rank(plain)
    assert get_mtp_ranks([3, 7], config(pipeline_model_parallel_size=2, mtp_num_layers=1)) == [7]
    early = config(pipeline_model_parallel_size=2, mtp_num_layers=1, pipeline_model_parallel_layout="Ett|t|tm|L")
    assert get_mtp_ranks([3, 7], early) == [3]
    assert mtp_on_this_rank(early) and mtp_on_this_rank(early, ignore_virtual=False, vp_stage=1)
    assert not mtp_on_this_rank(early, ignore_virtual=False, vp_stage=0)


def test_a_roll_stops_at_the_end_of_a_row_or_document() -> None:
    rows = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    rolled, total = roll_tensor(rows)
    assert rolled.tolist() == [[2, 3, 4, 0], [6, 7, 8, 0]] and total == 30
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 1, 4], dtype=torch.int32))
    assert roll_tensor(rows[:1], packed_seq_params=packed)[0].tolist() == [[0, 3, 4, 0]]
    with pytest.raises(UserError, match="shifts 1"):
        roll_tensor(rows, shifts=1)


def test_a_repeated_layer_is_that_of_all_depths() -> None:
    """mtp_use_repeated_layer: gradients are the sum over the depths of a model whose layers have equal weights."""
    several = predicting_model(predicting_config(mtp_num_layers=3, **LLAMA), **ROPE)
    randomize(several)
    for layer in several.mtp.layers[1:]:
        layer.load_state_dict(several.mtp.layers[0].state_dict())
    repeated = predicting_model(predicting_config(mtp_num_layers=3, mtp_use_repeated_layer=True, **LLAMA), **ROPE)
    assert len(repeated.mtp.layers) == 1
    repeated.load_state_dict({name: several.state_dict()[name] for name in repeated.state_dict()})
    (loss, reports), (expected, wanted) = (ours(model, True, scale=2.0) for model in (repeated, several))
    assert loss == expected and [(one.name, one.total) for one in reports] == [(one.name, one.total) for one in wanted]
    theirs = dict(several.named_parameters())
    for name, parameter in repeated.named_parameters():
        sources = [name.replace("mtp.layers.0.", f"mtp.layers.{depth}.") for depth in range(3)]
        grads = [theirs[source].grad for source in dict.fromkeys(sources)]
        torch.testing.assert_close(parameter.grad, sum(grads), rtol=1e-12, atol=1e-12)


def test_depths_of_a_repeated_layer_have_masks_of_their_own() -> None:
    settings = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True, "hidden_dropout": 0.5}
    model = predicting_model(predicting_config(**settings), **ROPE).train()
    seen = []
    layer = model.mtp.layers[0]
    layer.transformer_layer.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[1].hidden_dropout_position(3, "mlp"))
    )
    ours(model, False, scale=1.0)
    assert len(seen) == 2 and seen[0] != seen[1]


@pytest.mark.parametrize("keywords", [ROPE, TIED])
def test_detached_heads_train_prediction_layers_only(keywords: dict[str, Any]) -> None:
    """mtp_detach_heads: other weights have the gradient of a model without prediction layers."""
    grads: dict[str, dict[str, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for name, settings in {
        "attached": {},
        "detached": {"mtp_detach_heads": True},
        "without": {"mtp_num_layers": None},
    }.items():
        model = predicting_model(predicting_config(**settings), **keywords)
        if not weights:
            randomize(model)
            weights = model.state_dict()
        model.load_state_dict({key: weights[key] for key in model.state_dict()})
        ours(model, False, scale=1.0)
        grads[name] = {key: parameter.grad for key, parameter in model.named_parameters()}
    for key, grad in grads["detached"].items():
        if key in grads["without"]:
            torch.testing.assert_close(grad, grads["without"][key], rtol=1e-12, atol=1e-12)
            assert not torch.allclose(grad, grads["attached"][key])
        else:
            assert torch.count_nonzero(grad)
    last = [key for key in grads["detached"] if key.startswith("mtp.layers.1.")]
    assert last and all(torch.equal(grads["detached"][key], grads["attached"][key]) for key in last)
