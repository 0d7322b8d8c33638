"""The router with one rank: numbers of Megatron-LM's release, and the effect of each field."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.exceptions import UserError
from megatron.core.parameters import info_of
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.layer_metrics import take_layer_metrics
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.recomputed import Recomputed

GOLDEN = Path(__file__).parents[3] / "data" / "golden" / "moe_mla"
S, B, H, EXPERTS = 8, 2, 16, 4


def config(**fields: Any) -> TransformerConfig:
    base = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 4, "add_bias_linear": False, "fp64": True}
    return TransformerConfig(**base | {"num_moe_experts": EXPERTS, "init_method_std": 0.5} | fields)


def router(**fields: Any) -> TopKRouter:
    torch.manual_seed(1)
    return TopKRouter(config(**fields), layer_number=2)


def hidden(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(S * B, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(**fields: Any) -> LayerInputs:
    return LayerInputs(Tokens(S, B, random=RngPosition(1, 5)), **fields)


def reports(of: TopKRouter) -> dict[str, Tensor]:
    return {report.name: report.total / report.count for report in take_layer_metrics([of])}


# ---------------------------------------------------------------------------------------------------------------------
# A release of Megatron-LM


@pytest.mark.parametrize("model", ["moe_softmax_auxloss", "moe_sigmoid_group_bias_shared"])
def test_megatron_lm_release_routes_alike(model: str) -> None:
    info = json.loads((GOLDEN / "info.json").read_text())[model]
    weights, io = (load_file(GOLDEN / f"{model}.{kind}.safetensors") for kind in ("weights", "io"))
    settings = TransformerConfig(**info["config"] | {"activation_func": F.silu})
    layers = [int(name.split(".")[2]) for name in io if name.endswith("router.input")]
    for layer in layers:
        prefix = f"decoder.layers.{layer}.mlp.router."
        ours = TopKRouter(settings, layer_number=layer + 1)
        ours.load_state_dict({name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)})
        probabilities, chosen = ours(io[prefix + "input"])
        assert torch.equal(chosen, io[prefix + "map"].bool())
        torch.testing.assert_close(probabilities, io[prefix + "probs"], rtol=1e-6, atol=1e-6)
        found = reports(ours)
        for name, by_layer in info["tracked_aux"].items():
            assert float(found[name]) == pytest.approx(by_layer[layer], rel=1e-6)
        if prefix + "tokens_per_expert" in io:
            assert torch.equal(ours.take_tokens_per_expert().float(), io[prefix + "tokens_per_expert"])
    assert layers


def test_state_dict_has_megatron_lms_names() -> None:
    full = router(add_bias_linear=True, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    assert {name: tuple(value.shape) for name, value in full.state_dict().items()} == {
        "weight": (EXPERTS, H),
        "bias": (EXPERTS,),
        "expert_bias": (EXPERTS,),
    }
    assert full.bias is not None and full.bias.abs().min() > 0  # drawn as the weight is
    assert router(add_bias_linear=True, moe_router_bias=False).bias is None
    assert router(moe_router_bias=True).bias is not None


# ---------------------------------------------------------------------------------------------------------------------
# Auxiliary losses


def loss_of_weight(of: TopKRouter, weight: Tensor, kind: str) -> Tensor:
    """The loss as a function of the router's weight, by its formula."""
    scores = torch.softmax(hidden() @ weight.t(), -1)
    counts = F.one_hot(scores.topk(of.topk).indices, EXPERTS).sum(1).double()
    if kind == "z_loss":
        return torch.logsumexp(hidden() @ weight.t(), -1).square().mean()
    rows = [slice(None)] if kind != "seq_aux_loss" else [slice(row, None, B) for row in range(B)]
    values = [
        EXPERTS / (of.topk * scores[row].shape[0] ** 2) * (scores[row].sum(0) * counts[row].sum(0)).sum()
        for row in rows
    ]
    return torch.stack(values).mean()


KINDS: dict[str, dict[str, Any]] = {
    "aux_loss": {"moe_aux_loss_coeff": 0.3},
    "seq_aux_loss": {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "seq_aux_loss"},
    "global_aux_loss": {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "global_aux_loss"},
    "z_loss": {"moe_z_loss_coeff": 0.3},
}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_reaches_the_weight_by_coefficient_and_scale(kind: str, per_token: bool) -> None:
    ours = router(**KINDS[kind], calculate_per_token_loss=per_token)
    routing = ours.route(hidden(), inputs(auxiliary_scale=torch.tensor(2.0)))
    (routing.weights.sum() * 0).backward()  # the weights of a token sum to 1: nothing but the loss has a gradient
    weight = ours.weight.detach().clone().requires_grad_()
    value = loss_of_weight(ours, weight, kind)
    (value * 0.3 * 2.0 * (S * B if per_token else 1)).backward()
    torch.testing.assert_close(ours.weight.grad, weight.grad, rtol=1e-10, atol=1e-14)
    assert weight.grad is not None and weight.grad.abs().max() > 1e-4
    names = {"z_loss": "z_loss"} | {k: k.replace("aux_loss", "load_balancing_loss") for k in KINDS if k != "z_loss"}
    assert float(reports(ours)[names[kind]]) == pytest.approx(float(value.detach()), rel=1e-12)


def test_several_losses_add_up() -> None:
    kinds = ["aux_loss", "seq_aux_loss"]
    ours = router(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=[0.3, 0.7])
    (ours.route(hidden(), inputs()).weights.sum() * 0).backward()
    weight = ours.weight.detach().clone().requires_grad_()
    (0.3 * loss_of_weight(ours, weight, "aux_loss") + 0.7 * loss_of_weight(ours, weight, "seq_aux_loss")).backward()
    torch.testing.assert_close(ours.weight.grad, weight.grad, rtol=1e-10, atol=1e-14)


def test_an_evaluation_and_a_pass_without_gradients_add_nothing() -> None:
    fields = KINDS["aux_loss"] | {"moe_z_loss_coeff": 0.1}
    ours = router(**fields, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    ours.eval()
    ours.route(hidden(), inputs()).weights.square().sum().backward()
    plain = router(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    plain.route(hidden(), inputs()).weights.square().sum().backward()
    assert torch.equal(ours.weight.grad, plain.weight.grad)
    assert ours.local_tokens_per_expert is None and plain.local_tokens_per_expert is not None
    ours.train()
    reports(ours)
    with torch.no_grad():
        ours.route(hidden(), inputs())
    assert not reports(ours) and ours.local_tokens_per_expert is None


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("again", [functools.partial(checkpoint, use_reentrant=True), lambda f, x: Recomputed(f)(x)])
def test_a_router_that_is_computed_again_counts_once(kind: str, again: Any) -> None:
    fields = KINDS[kind] | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    once, twice = router(**fields, moe_input_jitter_eps=0.1), router(**fields, moe_input_jitter_eps=0.1)
    x = hidden().requires_grad_()
    once.route(x, inputs()).weights.square().sum().backward()
    y = hidden().requires_grad_()
    # The square is inside: a second pass goes only as far as backward needs it.
    again(lambda z: twice.route(z, inputs()).weights.square(), y).sum().backward()
    assert torch.equal(once.weight.grad, twice.weight.grad) and torch.equal(x.grad, y.grad)
    assert torch.equal(once.take_tokens_per_expert(), twice.take_tokens_per_expert())
    found, expected = reports(twice), reports(once)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert once.global_balance.calls == twice.global_balance.calls == (kind == "global_aux_loss")


# ---------------------------------------------------------------------------------------------------------------------
# Capacity, Sinkhorn, noise


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_what_finds_no_room_has_no_weight(policy: Any) -> None:
    free = router().route(hidden(), inputs())
    ours = router(moe_expert_capacity_factor=0.75, moe_token_drop_policy=policy)
    routing = ours.route(hidden(), inputs())
    capacity = 6  # 16 tokens * 2 / 4 * 0.75
    dense, chosen = (t.detach() for t in free.dense(EXPERTS))
    for expert in range(EXPERTS):
        takers = chosen[:, expert].nonzero().flatten().tolist()
        takers.sort(key=lambda t: (-float(dense[t, expert]) if policy == "probs" else 0.0, t))
        weights, kept = routing.dense(EXPERTS)
        assert sorted(takers[:capacity]) == kept[:, expert].nonzero().flatten().tolist()
        torch.testing.assert_close(weights[:, expert], dense[:, expert] * kept[:, expert])
    assert routing.kept is not None and not routing.kept.all()
    assert (routing.weights[~routing.kept] == 0).all()
    found = reports(ours)
    assert float(found["moe_dropped"]) == pytest.approx(1 - float(routing.kept.double().mean()))
    assert torch.equal(found["moe_load"], routing.tokens_per_expert(EXPERTS).double())


def test_with_room_for_all_nothing_is_dropped() -> None:
    assert router(moe_expert_capacity_factor=2.0).route(hidden(), inputs()).kept is None
    assert router(moe_expert_capacity_factor=-1.0).route(hidden(), inputs()).kept is None


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn_spreads_tokens_in_training_only(k: int) -> None:
    fields = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": k}
    ours = router(**fields)
    ours.weight.data[0] += 2 * hidden(3).mean(0)  # one expert that many would take
    skewed = hidden() + hidden(3).mean(0)
    balanced = ours.route(skewed, inputs())
    scores = skewed @ ours.weight.detach().t()
    scores = torch.sigmoid(scores) if k == 1 else torch.softmax(scores, -1)
    torch.testing.assert_close(balanced.weights, scores.gather(1, balanced.experts))
    ours.eval()
    greedy = ours.route(skewed, inputs())
    assert torch.equal(greedy.experts, scores.topk(k).indices)
    spread = [routing.tokens_per_expert(EXPERTS).double().var() for routing in (balanced, greedy)]
    assert spread[0] < spread[1]


def test_jitter_moves_the_routers_input_a_little_and_only_in_training() -> None:
    ours = router(moe_input_jitter_eps=0.01)
    plain = router().route(hidden(), inputs()).dense(EXPERTS)[0]
    noisy = ours.route(hidden(), inputs()).dense(EXPERTS)[0]
    assert 1e-5 < (noisy - plain).abs().max() < 0.1
    assert torch.equal(noisy, ours.route(hidden(), inputs()).dense(EXPERTS)[0])
    later = LayerInputs(Tokens(S, B, random=RngPosition(1, 6)))
    assert not torch.equal(noisy, ours.route(hidden(), later).dense(EXPERTS)[0])
    ours.eval()
    assert torch.equal(ours.route(hidden(), inputs()).dense(EXPERTS)[0], plain)


def test_forced_balance_ignores_the_input_and_passes_gradients() -> None:
    ours = router(moe_router_force_load_balancing=True)
    first, second = ours.route(hidden(), inputs()), ours.route(hidden(1), inputs())
    assert torch.equal(first.experts, second.experts) and torch.equal(first.weights, second.weights)
    first.weights.square().sum().backward()
    assert ours.weight.grad is not None and ours.weight.grad.abs().max() > 1e-3
    many = LayerInputs(Tokens(1000, 2, random=RngPosition(1, 5)))
    loads = ours.route(torch.zeros(2000, H, dtype=torch.float64), many).tokens_per_expert(EXPERTS)
    assert loads.min() > 900 and loads.max() < 1100


# ---------------------------------------------------------------------------------------------------------------------
# Types and the expert bias


@pytest.mark.parametrize(("dtype", "wide"), [(None, torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)])
def test_logits_are_computed_in_the_routers_type(dtype: Any, wide: torch.dtype) -> None:
    ours = router(fp64=False, bf16=True, params_dtype=torch.bfloat16, moe_router_dtype=dtype)
    x = hidden(dtype=torch.bfloat16)
    logits = ours.gating(x)
    assert logits.dtype is wide
    torch.testing.assert_close(logits, F.linear(x.to(wide), ours.weight.to(wide)))
    assert ours.route(x, inputs()).weights.dtype is torch.promote_types(wide, torch.float32)


def test_fp32_is_no_less_than_the_models_type() -> None:
    assert router(moe_router_dtype="fp32").route(hidden(), inputs()).weights.dtype is torch.float64


def test_the_expert_bias_stays_float32_in_a_half_precision_model() -> None:
    fields = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    ours = router(fp64=False, bf16=True, params_dtype=torch.float32, **fields)
    assert ours.expert_bias is not None
    ours.expert_bias.data.fill_(1.001)
    parameter = ours.expert_bias
    Float16Module(ours.config, ours)
    assert ours.weight.dtype is torch.bfloat16
    assert ours.expert_bias is parameter and parameter.dtype is torch.float32 and not parameter.requires_grad
    assert (parameter == torch.tensor(1.001)).all()
    assert list(ours.state_dict()) == ["weight", "expert_bias"]
    assert info_of(parameter).global_shape == (EXPERTS,)
    assert ours.to("meta").expert_bias.is_meta and ours.to_empty(device="cpu").expert_bias.dtype is torch.float32


def test_the_expert_bias_moves_against_the_load() -> None:
    fields = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    ours = router(**fields, moe_router_bias_update_rate=0.25)
    ours.move_expert_bias(torch.tensor([10.0, 4.0, 6.0, 4.0]))
    assert ours.expert_bias is not None and ours.expert_bias.tolist() == [-0.25, 0.25, 0.0, 0.25]


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.3, 0.2]},
        {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1},
        {"moe_expert_capacity_factor": 0.5, "calculate_per_token_loss": True, "moe_z_loss_coeff": 0.1},
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    ],
    ids=["aux and seq", "global and z", "capacity", "capacity by position"],
)
def test_rows_with_padding_are_routed_as_without(fields: dict[str, Any]) -> None:
    results = []
    rows = hidden().view(S, B, H)
    for length, mask in ((S - 3, None), (S, (torch.arange(S) >= S - 3).expand(B, -1))):
        ours = router(**fields)
        given = LayerInputs(Tokens(length, B), padding_mask=mask)
        routing = ours.route(rows[:length].flatten(0, 1), given)
        (routing.weights * torch.linspace(0.5, 1.5, 2)).sum().backward()
        real = (S - 3) * B
        if mask is not None:
            assert not routing.kept[real:].any() and not routing.weights[real:].any()
        kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
        load = routing.tokens_per_expert(EXPERTS)
        results.append([routing.experts[:real], routing.weights[:real], kept[:real], load, ours.weight.grad])
        results[-1] += [value for _, value in sorted(reports(ours).items())]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_padding_in_megatron_lms_form() -> None:
    mask = torch.zeros(S, B, dtype=torch.bool)
    mask[3:, 1] = True
    weights, chosen = router()(hidden().view(S, B, H), mask)
    assert chosen.sum(1).view(S, B).eq(torch.where(mask, 0, 2)).all() and not weights[mask.flatten()].any()
    with pytest.raises(UserError, match="padding_mask does not go with sinkhorn routing"):
        router(moe_router_load_balancing_type="sinkhorn")(hidden().view(S, B, H), mask)


def test_megatron_lms_methods_say_what_counts() -> None:
    ours = router(**KINDS["seq_aux_loss"])
    assert ours.is_aux_loss_enabled() and ours.get_aux_loss_coeff("seq_aux_loss") == 0.3
    assert ours.get_aux_loss_coeff("aux_loss") == 0.0 and not router().is_aux_loss_enabled()
    rows = hidden().view(S, B, H)
    weights, chosen = ours.routing(rows @ ours.weight.t())
    expected, places = ours(rows)
    assert torch.equal(weights, expected) and torch.equal(chosen, places) and chosen.sum(1).eq(2).all()
