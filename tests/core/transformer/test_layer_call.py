"""Layers in Megatron-LM's form: ours called so by a script, and a script's in a layer spec, against `LayerInputs`."""

from typing import Any

import pytest
import torch
from support.exact_gradients import UNIFORM, recomputing
from support.pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.inference.static_context import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.layer_inputs import EncoderStates, LayerInputs
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

S, B, H = 8, 2, 16


class Scaled(TransformerLayer):
    """Written from Megatron-LM's documentation."""

    factor = 1.0

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        assert hidden_states.dim() == 3
        hidden_states, context = super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        return hidden_states * self.factor, context


class Forwarding(TransformerLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class WithoutPositions(TransformerLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        assert rotary_pos_emb is not None
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=None, **kwargs)


class OfOlderReleases(TransformerLayer):
    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, inference_params: Any = None, rotary_pos_emb: Any = None
    ) -> Any:
        given = {"inference_params": inference_params, "rotary_pos_emb": rotary_pos_emb}
        return super().forward(hidden_states, attention_mask, **given)


def config(**settings: Any) -> TransformerConfig:
    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0} | settings
    return TransformerConfig(num_layers=2, hidden_size=H, num_attention_heads=4, fp64=True, **settings)


def model_of(
    layer: type[nn.Module], settings: TransformerConfig, position: str = "rope", groups: Any = None
) -> GPTModel:
    spec = get_gpt_layer_local_spec()
    spec.module = layer
    return GPTModel(settings, spec, 32, S, position_embedding_type=position, pg_collection=groups)


def states() -> Tensor:
    return torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def results(layer: type[nn.Module], settings: TransformerConfig, groups: Any = None, **given: Any) -> list[Tensor]:
    """Returns losses and gradients of a model of such layers, at one place of a run."""
    torch.manual_seed(3)
    model = model_of(layer, settings, groups=groups)
    packed = given.pop("packed", False)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(32, (1 if packed else B, S), generator=generator)
    cut = {"cu_seqlens": torch.tensor([0, 3, S], dtype=torch.int32), "max_seqlen": 5} if packed else {}
    tokens = Tokens(S, len(ids), random=RngPosition(5, 1), **cut)
    losses = model(ids, labels=ids, tokens=tokens, **given)
    losses.sum().backward()
    return [losses.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 3
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


MASK = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(2)) < 0.3
MASK &= ~torch.eye(S, dtype=torch.bool)
DROPS = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
FULL = UNIFORM | {"recompute_num_layers": 2}
SELECTIVE = recomputing("core_attn", "layernorm", "mlp")


@pytest.mark.parametrize("layer", [Scaled, Forwarding])
@pytest.mark.parametrize("settings", [DROPS, FULL | DROPS, SELECTIVE | DROPS], ids=["kept", "full", "selective"])
def test_a_scripts_layer_is_called_as_in_megatron_lm(layer: type[nn.Module], settings: dict[str, Any]) -> None:
    same(results(layer, config(**settings)), results(TransformerLayer, config(**settings)))
    given = {"attention_mask": MASK}
    same(results(layer, config(**settings), **given), results(TransformerLayer, config(**settings), **given))
    same(results(layer, config(**settings), packed=True), results(TransformerLayer, config(**settings), packed=True))


def test_its_changes_count() -> None:
    class Halved(Scaled):
        factor = 0.5

    model = model_of(Halved, config())
    hidden, inputs = states(), LayerInputs(Tokens(S, B))
    expected = hidden.flatten(0, 1)
    for layer in model.decoder.layers:
        expected = layer.add_branches(expected, inputs) * 0.5
    found = model.decoder.run_layers(model.decoder.layers, hidden.flatten(0, 1), inputs)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    rope, none = model_of(WithoutPositions, config()), model_of(TransformerLayer, config(), position="none")
    none.load_state_dict(rope.state_dict())
    ids = torch.arange(S)[None]
    assert torch.equal(rope(ids, labels=ids), none(ids, labels=ids))


@pytest.mark.parametrize("layer", [Scaled, OfOlderReleases])
def test_generation_is_that_of_the_block(layer: type[nn.Module]) -> None:
    model, ours = model_of(layer, config()), model_of(TransformerLayer, config())
    ours.load_state_dict(model.state_dict())
    ids, context = torch.arange(4)[None], StaticInferenceContext(1, S)
    found = model(ids, context.begin(torch.tensor([4]), 4), inference_context=context)
    torch.testing.assert_close(found[0, 0], ours(ids)[0, -1], rtol=0.0, atol=1e-12)
    found = model(torch.tensor([[4]]), context.advance(), inference_context=context)
    torch.testing.assert_close(found[0, 0], ours(torch.arange(5)[None])[0, -1], rtol=0.0, atol=1e-12)


def of_a_rank(layer: type[nn.Module], sequence_parallel: bool, settings: dict[str, Any]) -> list[Tensor]:
    groups = ProcessGroupCollection.from_grid(RankGrid(2, tensor=2), torch.distributed.get_rank())
    split = config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, **settings)
    return results(layer, split, groups)


def test_under_tensor_parallelism(pool: Pool) -> None:
    for sequence_parallel, settings in ((False, FULL | DROPS), (True, FULL | DROPS), (True, DROPS)):
        runs = [pool.run(of_a_rank, 2, kind, sequence_parallel, settings) for kind in (Scaled, TransformerLayer)]
        for found, expected in zip(*runs, strict=True):
            same(found, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Ours, called by a script


def test_our_layer_and_block_take_megatron_lms_arguments() -> None:
    model = model_of(TransformerLayer, config())
    layer, hidden, angles = model.decoder.layers[0], states(), model.rotary_pos_emb(S)
    inputs = LayerInputs(Tokens(S, B), model.rotary_pos_emb(torch.arange(S)[None]), attention_mask=MASK)
    expected = layer(hidden.flatten(0, 1), inputs).view(S, B, H)
    for found, context in (
        layer(hidden, attention_mask=MASK, rotary_pos_emb=angles),
        layer(hidden, MASK, None, None, (angles, angles)),
        layer(hidden_states=hidden, attention_mask=MASK, rotary_pos_emb=inputs.rotation, inference_params=None),
    ):
        assert context is None
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)
    found = model.decoder(hidden_states=hidden, attention_mask=MASK, rotary_pos_emb=angles)
    torch.testing.assert_close(found, model.decoder(hidden, inputs=inputs), rtol=0.0, atol=1e-12)
    packed = PackedSeqParams("thd", *[torch.tensor([0, 3, S], dtype=torch.int32)] * 2, max_seqlen_q=5, max_seqlen_kv=5)
    row = hidden[:, :1]
    found, _ = layer(row, None, packed_seq_params=packed)
    apart = torch.cat([layer(part, None)[0] for part in (row[:3], row[3:])])
    torch.testing.assert_close(found, apart, rtol=0.0, atol=1e-12)


def test_cross_attention_reads_the_context() -> None:
    model = model_of(TransformerLayer, config())
    layer = TransformerLayer(config(), get_t5_decoder_with_local_block_spec(1).layer_specs[0].submodules, 1)
    layer.load_state_dict(model.decoder.layers[0].state_dict(), strict=False)
    hidden, encoder = states(), states()[:5] + 1.0
    inputs = LayerInputs(Tokens(S, B), encoder=EncoderStates(encoder.flatten(0, 1), Tokens(5, B)))
    found, context = layer(hidden, None, encoder)
    assert context is encoder
    torch.testing.assert_close(found, layer(hidden.flatten(0, 1), inputs).view(S, B, H), rtol=0.0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


class Narrow(TransformerLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Any:
        return super().forward(hidden_states, attention_mask)


class Shortening(TransformerLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states[1:], **kwargs)


class Mixing(TransformerLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states, **{**kwargs, "context": hidden_states})


class Recomputing(TransformerLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return checkpoint(super().forward, hidden_states, use_reentrant=False, **kwargs)


def test_what_cannot_be_followed_is_refused() -> None:
    for kind, message in (
        (Narrow, r"Narrow.forward of a layer spec does not take rotary_pos_emb; add \*\*kwargs"),
        (Shortening, r"hidden states of shape \[7, 2, 16\] within a block whose micro-batch has 8 tokens in 2 rows"),
        (Mixing, "a layer of a block cannot change context; pass on the block's value"),
        (Recomputing, "a layer of a block that recomputes by itself loses its dropout masks"),
    ):
        with pytest.raises(UserError, match=message):
            results(kind, config())
    layer, hidden = model_of(TransformerLayer, config()).decoder.layers[0], states()
    for given, message in (
        ({"rotary_pos_emb": torch.ones(3, 1, 1, 4)}, "rotary_pos_emb is angles of 3 positions; give the angles"),
        ({"rotary_pos_emb": "angles"}, "rotary_pos_emb is a str"),
        ({"rotary_pos_cos": hidden}, "rotary_pos_cos of a layer: not here; give rotary_pos_emb"),
        ({"inference_context": StaticInferenceContext(1, 8)}, "inference_context: not in a call of layers without"),
    ):
        with pytest.raises(UserError, match=message):
            layer(hidden, None, **given)
    with pytest.raises(TypeError, match="no_such_argument"):
        layer(hidden, None, no_such_argument=1)
    yarn = model_of(TransformerLayer, config(rope_scaling_type="yarn", rope_scaling_original_length=8))
    with pytest.raises(UserError, match="rotary_pos_emb with rope_scaling_type yarn: angles do not tell the amplitude"):
        yarn.decoder(hidden, None, rotary_pos_emb=yarn.rotary_pos_emb(S))
