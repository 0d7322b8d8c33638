"""Recompute by every way of asking for it: no bit of the numbers changes, and memory does."""

from unittest import mock

import pytest
import torch
from support.exact_gradients import ROWS, UNIFORM, assert_equal, gradients, gradients_of_a_copy, kept_by, recomputing
from support.processes import run_on_ranks
from support.tiny_models import tiny_config, tiny_gpt
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.recompute import recompute_parts
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils.recomputed import Recomputed
from megatron.facades import parallel_state

LENGTH, LAYERS, WIDTH = 32, 3, 64

WAYS = {
    "uniform": UNIFORM,
    "uniform by 2": UNIFORM | {"recompute_num_layers": 2},
    "block of 2": UNIFORM | {"recompute_method": "block", "recompute_num_layers": 2},
    "core_attn": {"recompute_granularity": "selective"},
    "layernorm": recomputing("layernorm"),
    "mlp": recomputing("mlp"),
    "mlp_act": recomputing("mlp_act"),
    "layernorm and mlp": recomputing("layernorm", "mlp"),
    "all parts": recomputing("core_attn", "layernorm", "mlp"),
}


def build(**settings) -> GPTModel:
    sizes = {"num_layers": LAYERS, "hidden_size": WIDTH, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    return tiny_gpt(tiny_config(**sizes | settings), 50, LENGTH)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_no_bit_changes(way, precision):
    """With both kinds of dropout on."""
    settings = {"fp64": False, "bf16": True, "params_dtype": torch.bfloat16} if precision == "bf16" else {}
    assert_equal(gradients(build(**settings, **WAYS[way])), gradients(build(**settings)))


@pytest.mark.parametrize("way", ["uniform", "all parts", None])
def test_chunks_of_an_mlp_change_the_order_of_sums_alone(way):
    """64 tokens in chunks of 13."""
    expected, found = gradients(build()), gradients(build(mlp_chunks_for_training=5, **WAYS.get(way, {})))
    assert expected.keys() == found.keys()
    assert all(torch.allclose(found[name], value, rtol=1e-12, atol=1e-13) for name, value in expected.items())
    assert not all(torch.equal(found[name], value) for name, value in expected.items())


def test_chunks_of_an_mlp_keep_its_input_alone():
    """Beside it a state of torch's generator for each further chunk. Recomputation of the whole MLP keeps the same."""
    states = 4 * LAYERS * torch.get_rng_state().numel()
    assert kept_by(build(mlp_chunks_for_training=5)) - states == pytest.approx(kept_by(build(**WAYS["mlp"])), rel=0.005)


@pytest.mark.parametrize("way", ["uniform", "block of 2", "mlp_act", "all parts"])
def test_a_gated_model_with_norms_of_queries_and_keys(way):
    settings = {"gated_linear_unit": True, "normalization": "RMSNorm", "add_bias_linear": False}
    assert_equal(gradients(build(**settings, **WAYS[way])), gradients(build(**settings)))


@pytest.mark.parametrize("placement", ["post", "sandwich", "parallel", "parallel_two_norms"])
@pytest.mark.parametrize("way", ["uniform", "layernorm", "all parts"])
def test_wherever_norms_stand(way, placement):
    assert_equal(gradients(build(norm_placement=placement, **WAYS[way])), gradients(build(norm_placement=placement)))


@pytest.mark.parametrize(("placement", "count"), [("parallel", 1), ("parallel_two_norms", 2), ("sandwich", 2)])
def test_norms_that_a_product_reads_are_discarded(placement, count):
    settings = {"norm_placement": placement}
    saved = (kept_by(build(**settings)) - kept_by(build(**settings, **WAYS["layernorm"]))) / LAYERS / HIDDEN
    assert saved == pytest.approx(count, abs=0.1)


HIDDEN = LENGTH * ROWS * WIDTH * 8
"""Bytes of one hidden state [t, h] of the model above."""


@pytest.mark.slow
def test_memory_that_is_kept():
    """By the layer, in hidden states: what each way saves, against what its name promises."""
    kept = {way: kept_by(build(**settings)) for way, settings in WAYS.items()}
    nothing = kept_by(build())
    saved = {way: (nothing - count) / LAYERS / HIDDEN for way, count in kept.items()}
    assert saved["layernorm"] == pytest.approx(2, abs=0.1)  # the two norms' results
    # fc1's result and the activation's, 4 each; not fc2's, which the addition keeps nothing of.
    assert saved["mlp"] == pytest.approx(8, abs=0.6)
    assert saved["mlp_act"] == pytest.approx(4, abs=0.3)  # the activation's result; states of the generator are kept
    assert saved["layernorm and mlp"] == pytest.approx(saved["layernorm"] + saved["mlp"], abs=0.1)
    assert saved["core_attn"] > 0.9  # at least its result, which the projection wants again
    assert saved["all parts"] == pytest.approx(saved["core_attn"] + saved["layernorm and mlp"], abs=0.1)
    full, by_two, block = (kept[way] for way in ("uniform", "uniform by 2", "block of 2"))
    assert by_two < full < block < nothing
    state = torch.get_rng_state().numel()
    assert full - by_two == pytest.approx(HIDDEN + state, rel=0.02)  # 2 kept inputs for 3, and states of the generator
    assert (block - full) * LAYERS == pytest.approx(nothing - full, rel=0.1)


def test_a_copied_model_is_recomputed_with_its_own_weights():
    for way in ("uniform", "block of 2", "all parts"):
        assert_equal(gradients_of_a_copy(build(**WAYS[way])), gradients(build()))


class Drawing(nn.Module):
    """An MLP of a user, which draws from torch's generator."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(WIDTH))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        return nn.functional.dropout(self.linear(hidden_states).sin(), 0.3, self.training), None


def test_draws_of_a_users_own_module_are_repeated():
    def run(**settings) -> dict[str, Tensor]:
        spec = get_gpt_layer_local_spec()
        spec.submodules.mlp = Drawing
        config = TransformerConfig(num_layers=2, hidden_size=WIDTH, num_attention_heads=4, fp64=True, **settings)
        torch.manual_seed(1)  # for the weights of the user's part, and for what it draws
        return gradients(GPTModel(config, spec, vocab_size=50, max_sequence_length=LENGTH))

    plain = run()
    for way in ("uniform", "mlp"):
        assert_equal(run(**WAYS[way]), plain)


def test_a_part_that_a_layer_does_not_have_is_named():
    layer = build_module(
        ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules()),
        config=TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2),
    )
    recompute_parts(layer, ["core_attn", "mlp", "mla_up_proj"])  # a layer of one branch is left as it is
    layer.self_attention = nn.Module()
    with pytest.raises(UserError, match="core_attn: a TransformerLayer has no such part"):
        recompute_parts(layer, ["core_attn"])
    for module in ("mla_up_proj", "shared_experts"):
        if module == "shared_experts":
            layer.mlp = nn.Module()
            layer.mlp.experts = nn.Module()
        with pytest.raises(UserError, match=f"{module}: a TransformerLayer has no such part"):
            recompute_parts(layer, [module])
    recompute_parts(layer, ["layernorm"])  # places that a spec leaves empty have nothing to discard


def test_an_attribute_error_inside_a_part_is_not_taken_for_a_missing_part():
    layer = build_module(
        ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules()),
        config=TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2),
    )
    layer.mlp = nn.Identity()
    forward = layer.mlp.forward
    broken = mock.patch("megatron.core.transformer.recompute.Recomputed", side_effect=AttributeError("a bug"))
    with broken, pytest.raises(AttributeError, match="a bug"):
        recompute_parts(layer, ["mlp"])
    assert layer.mlp.forward == forward


# ---------------------------------------------------------------------------------------------------------------------
# Split over ranks


def _spread() -> None:
    """Tensor parallel ranks share what is kept. tests/parity has all other ways in layouts."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    kept: list[tuple[int, int]] = []
    keep = Recomputed._keep

    def counted(recomputed: Recomputed, tensor: Tensor):
        share = keep(recomputed, tensor)
        kept.append((tensor.nbytes, share.flat.nbytes))
        return share

    plain = gradients(build(tensor_model_parallel_size=2))
    with mock.patch.object(Recomputed, "_keep", counted):
        spread = build(tensor_model_parallel_size=2, distribute_saved_activations=True, **WAYS["uniform"])
        assert_equal(gradients(spread), plain)
    assert kept == [(HIDDEN, HIDDEN // 2)] * LAYERS
    parallel_state.destroy_model_parallel()


def test_tensor_parallel_ranks_share_what_is_kept():
    run_on_ranks(_spread, 2)
