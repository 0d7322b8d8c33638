"""Routing replay: the recorded experts of one model are those of another, also in recomputed layers."""

import pytest
import torch
from support.exact_gradients import UNIFORM
from support.tiny_models import tiny_config, tiny_gpt

from megatron.core.exceptions import UserError
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay, router_replays
from megatron.training.config.flag_table import flag_table


def build(seed: int = 1, **settings: object) -> GPTModel:
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_enable_routing_replay": True, "seed": seed}
    sizes = {"num_attention_heads": 2, "ffn_hidden_size": 24, "init_method_std": 0.5, "add_bias_linear": False}
    config = tiny_config(**{**sizes, **experts, **settings})
    return tiny_gpt(config, 31, 8, position_embedding_type="rope")


def ids(seed: int) -> torch.Tensor:
    return torch.randint(31, (2, 6), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", [{}, UNIFORM], ids=["keep", "recompute"])
def test_a_model_replays_its_own_choice_to_the_bit(settings: dict[str, object]) -> None:
    model, gradients = build(**settings), []
    for replay in router_replays(model):
        replay.record()
    for repeated in (False, True):
        if repeated:
            assert [len(replay.recorded) for replay in router_replays(model)] == [2, 2]
            for replay in router_replays(model):
                replay.replay(replay.recorded)
        model.zero_grad()
        for seed in (1, 2):  # two micro-batches
            model(ids(seed), labels=ids(seed)).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_another_model_takes_the_experts_given_and_weighs_them_itself() -> None:
    first, second = build(1), build(2)
    for replay in router_replays(first):
        replay.record()
    first(ids(1))
    free = second(ids(1))
    for one, other in zip(router_replays(first), router_replays(second), strict=True):
        other.replay(one.recorded)
        other_layer = other.layer_number
        assert other_layer == one.layer_number
    led = second(ids(1), labels=ids(1))
    assert (free - build(2)(ids(1))).abs().max() == 0 and led.requires_grad
    led.sum().backward()
    assert all(layer.mlp.router.weight.grad.abs().max() > 0 for layer in second.decoder.layers)
    for replay in router_replays(second):
        replay.record()
    second(ids(1))
    chosen = [replay.recorded[0] for replay in router_replays(second)]
    given = [replay.recorded[0] for replay in router_replays(first)]
    assert any(not torch.equal(one, other) for one, other in zip(chosen, given, strict=True))


def test_what_does_not_fit_is_named() -> None:
    model = build()
    replays = router_replays(model)
    replays[0].replay([torch.zeros(3, 2, dtype=torch.int64)])
    with pytest.raises(UserError, match=r"layer 1: the experts given have the shape \[3, 2\], but this rank routes 12"):
        model(ids(1))
    with pytest.raises(UserError, match="layer 1: there are no experts for this forward"):
        model(ids(1))
    replays[0].stop()
    model(ids(1))


def test_without_the_flag_there_is_nothing_to_replay() -> None:
    assert router_replays(build(moe_enable_routing_replay=False)) == []
    assert RouterReplay().given(3, 2) is None
    assert "--moe-enable-routing-replay" in flag_table()["moe_enable_routing_replay"].spellings
