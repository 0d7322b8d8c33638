"""Latent attention: parts of other classes, what is sent. tests/parity has layouts, tests/core/inference the cache."""

import dataclasses
from typing import Any

import pytest
import torch
from support.boxes import error, fill, part_of, whole_gradients, whole_values
from support.pool import Pool
from support.split_rows import ROW, ROWS, VOCABULARY, loss_of_part
from support.tiny_models import OwnNorm, randomize, tiny_config, tiny_gpt
from torch import Tensor

from megatron.core.communication.traffic import recorded
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_spec_of
from megatron.core.parameters import info_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tokens import Tokens
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.multi_latent_attention import score_scale
from megatron.core.transformer.transformer_config import MLATransformerConfig

TOLERANCE = 1e-11
SIZES = {"kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5, "ffn_hidden_size": 24}
QUERY_LATENT = {"q_lora_rank": 12, "qk_layernorm": True, "rotary_scaling_factor": 4, "mscale_all_dim": 0.8}
"""With YaRN, whose frequencies of 4 channels change as `original_max_position_embeddings` says."""
MODELS: dict[str, dict[str, Any]] = {
    "queries at once": {"q_lora_rank": None, "rope_type": "rope", "attention_dropout": 0.2},
    "all latents": {**QUERY_LATENT, "original_max_position_embeddings": 8, "hidden_dropout": 0.2},
    "layers without positions, sinks": {**QUERY_LATENT, "no_rope_freq": 2, "softmax_type": "learnable"},
}


def build(settings: dict[str, Any], groups: ProcessGroupCollection | None = None, **layout: Any) -> GPTModel:
    settings = {key: value for key, value in settings.items() if key not in ("packed", "spec")} | layout
    config = tiny_config(MLATransformerConfig, **{"hidden_size": 18, "add_bias_linear": False, **SIZES, **settings})
    return tiny_gpt(config, VOCABULARY, ROW * ROWS, position_embedding_type="rope", pg_collection=groups)


TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}


# ---------------------------------------------------------------------------------------------------------------------
# Specs, and what is sent


def with_parts(spec: Any, **parts: Any) -> Any:
    """The spec of a layer whose attention has other parts."""
    attention = spec.submodules.self_attention
    attention = dataclasses.replace(attention, submodules=dataclasses.replace(attention.submodules, **parts))
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, self_attention=attention))


def errors_of_other_parts(expected: dict[str, Any], layout: dict[str, Any], norm: bool) -> dict[str, float]:
    """With down projections that are shared out, as in Megatron-LM's plain spec, and a user's own norms."""
    groups = ProcessGroupCollection.from_grid(RankGrid(2, tensor=2), torch.distributed.get_rank())
    config = build(MODELS["all latents"], groups, **layout).config
    config.hidden_dropout = 0.0
    down = {"linear_q_down_proj": ColumnParallelLinear, "linear_kv_down_proj": ColumnParallelLinear}
    norms = {"q_layernorm": OwnNorm, "kv_layernorm": OwnNorm} if norm else {}
    spec = with_parts(gpt_layer_spec_of(config, 1), **down, **norms)
    model = GPTModel(config, spec, VOCABULARY, ROW, pg_collection=groups)
    fill(model, expected["values"])
    errors = {"loss": error(loss_of_part(model, groups, False), expected["loss"])}
    for parameter in model.parameters():
        info, gradient = info_of(parameter), parameter.grad
        assert gradient is not None
        if "tp" in info.partial_gradient_axes:
            torch.distributed.all_reduce(gradient, group=groups.tp)
        box = gradient.reshape(-1)[: info.box.numel].view(info.box.shape)
        errors[info.name] = error(box, part_of(expected["gradients"][info.name], parameter))
    return errors


@pytest.mark.fast("-tp", "own norms-sp")
@pytest.mark.parametrize("layout", [TP2, SP2], ids=["tp", "sp"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "own norms"])
def test_parts_of_other_classes(layout: dict[str, Any], norm: bool, pool: Pool) -> None:
    config = build(MODELS["all latents"]).config
    config.hidden_dropout = 0.0
    spec = gpt_layer_spec_of(config, 1)
    whole = GPTModel(
        config, with_parts(spec, q_layernorm=OwnNorm, kv_layernorm=OwnNorm) if norm else spec, VOCABULARY, ROW
    )
    randomize(whole)
    expected = {"values": whole_values(whole), "loss": loss_of_part(whole, None, False)}
    expected |= {"gradients": whole_gradients(whole)}
    for errors in pool.run(errors_of_other_parts, 2, expected, layout, norm):
        assert len(errors) > 15 and all(value < TOLERANCE for value in errors.values()), errors


def test_a_spec_without_norms_where_the_config_wants_them() -> None:
    config = build(MODELS["all latents"]).config
    with pytest.raises(UserError, match="has no kv_layernorm"):
        GPTModel(config, with_parts(gpt_layer_spec_of(config, 1), kv_layernorm=IdentityOp), VOCABULARY, ROW)
    with pytest.raises(UserError, match="has no linear_q_up_proj"):
        GPTModel(config, with_parts(gpt_layer_spec_of(config, 1), linear_q_up_proj=None), VOCABULARY, ROW)


def bytes_of_a_layer() -> tuple[float, float]:
    groups = ProcessGroupCollection.from_grid(RankGrid(2, tensor=2), torch.distributed.get_rank())
    model = build({**MODELS["all latents"], "hidden_dropout": 0.0, "attention_dropout": 0.0}, groups, **SP2)
    attention = model.decoder.layers[0].self_attention
    hidden = torch.randn(ROW * ROWS // 2, 18, dtype=torch.float64)
    with recorded() as log:
        attention.compress(hidden, LayerInputs(Tokens(ROW, ROWS)))
        before = sum(entry.sent_bytes for entry in log)
        attention(hidden, LayerInputs(Tokens(ROW, ROWS)))
    return before, sum(entry.sent_bytes for entry in log) - before


def test_what_is_gathered_is_the_latents(pool: Pool) -> None:
    """Under sequence parallelism: numbers of the shared key before the heads, then both latents and the output."""
    before, forward = pool.run(bytes_of_a_layer, 2)[0]
    tokens = ROW * ROWS // 2 * 8  # of one rank, bytes of a number
    assert before == tokens * 4
    assert forward == tokens * (4 + 12 + 10 + 18)


# ---------------------------------------------------------------------------------------------------------------------
# The factor of the scores; positions


def test_factor_of_the_scores() -> None:
    def scale(**settings: Any) -> float:
        return score_scale(build({"q_lora_rank": None, **settings}).config)

    assert scale(rotary_scaling_factor=1.0, mscale_all_dim=1.0) == pytest.approx(10**-0.5)
    magnitude = 0.1 * 0.8 * torch.log(torch.tensor(4.0, dtype=torch.float64)).item() + 1
    for rope_type in ("rope", "yarn"):  # as in Megatron-LM, for either
        found = scale(rotary_scaling_factor=4.0, mscale_all_dim=0.8, rope_type=rope_type)
        assert found == pytest.approx(magnitude**2 * 10**-0.5, rel=1e-12)
    assert scale(softmax_scale=0.3, mscale_all_dim=0.8) == 0.3


def test_layers_without_positions() -> None:
    def logits(positions: Tensor, **settings: Any) -> Tensor:
        model = build({"q_lora_rank": None, "rope_type": "rope", "init_method_std": 0.4, **settings})
        return model(torch.arange(8)[None], position_ids=positions[None]).detach()

    counted, skipping = torch.arange(8), torch.tensor([0, 1, 2, 10, 11, 15, 16, 30])
    assert torch.equal(logits(counted, no_rope_freq=[1, 1]), logits(skipping, no_rope_freq=[1, 1]))
    for pattern in ([0, 1], [1, 0], None):
        changed = error(logits(skipping, no_rope_freq=pattern), logits(counted, no_rope_freq=pattern))
        assert changed > 1e-4
    assert error(logits(counted + 5), logits(counted)) < 1e-6  # angles are float32: only distances count
