"""Activations in host memory: no bit of the numbers changes, and what the flags name leaves the device."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support import exact_gradients
from support.exact_gradients import ROWS, UNIFORM, assert_equal, gradients_of_a_copy, loss_of, recomputing
from support.tiny_models import tiny_config, tiny_gpt
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.offload import offload_activations
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils.offloaded import SavedStorage

LENGTH, WIDTH, LAYERS = 8, 16, 3
HIDDEN = LENGTH * ROWS * WIDTH * 8
"""Bytes of one hidden state [t, h]."""

DENSE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1, 1],
    "moe_grouped_gemm": True,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "mtp_num_layers": 1,
}
LATENT: dict[str, Any] = {"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 4}
LATENT |= {"v_head_dim": 4, "qk_pos_emb_head_dim": 4, "rotary_base": 10000}


def fine(*modules: str, **settings: Any) -> dict[str, Any]:
    words = {"fine_grained_activation_offloading": True, "offload_modules": list(modules)}
    return words | {"min_offloaded_tensor_size": 0} | settings


def build(**settings: Any) -> GPTModel:
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    sizes = {"num_layers": LAYERS, "num_attention_heads": 2, "hidden_dropout": 0.1}
    return tiny_gpt(tiny_config(kind, **sizes | settings), 20, LENGTH)


def gradients(model: GPTModel, in_order: bool = True) -> dict[str, Tensor]:
    """Returns those of two micro-batches, whose backward passes follow both forward passes unless `in_order`."""
    model.zero_grad()
    if in_order:
        for number in range(2):
            loss_of(model, number).backward()
    else:
        losses = [loss_of(model, number) for number in range(2)]
        for loss in losses:
            loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Traffic:
    """Bytes that went to the host and came back."""

    def __init__(self) -> None:
        self.sent = self.returned = 0


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    counted, send, fetch = Traffic(), SavedStorage.start_offload, SavedStorage.start_reload

    def start_offload(storage: SavedStorage) -> None:
        counted.sent += storage.nbytes
        send(storage)

    def start_reload(storage: SavedStorage) -> None:
        counted.returned += storage.nbytes if storage._storage is None else 0
        fetch(storage)

    monkeypatch.setattr(SavedStorage, "start_offload", start_offload)
    monkeypatch.setattr(SavedStorage, "start_reload", start_reload)
    yield counted


PLAIN: dict[str, dict[str, Tensor]] = {}


def plain(**model: Any) -> dict[str, Tensor]:
    key = str(model)
    if key not in PLAIN:
        PLAIN[key] = gradients(build(**model))
    return PLAIN[key]


@pytest.mark.slow_cases("model2-settings2")
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ({}, fine(*DENSE)),
        ({}, fine(*DENSE, fine_grained_offloading_max_inflight_offloads=0)),
        ({}, fine(*DENSE) | recomputing("layernorm", "core_attn", "mlp")),
        ({}, {"cpu_offloading_num_layers": 2}),
        ({}, {"cpu_offloading_num_layers": LAYERS} | UNIFORM),
        ({}, {"cpu_offloading_num_layers": 2} | recomputing("layernorm", "mlp")),
        (EXPERTS, fine(*DENSE, "expert_fc1", "moe_act")),
        (EXPERTS | {"moe_grouped_gemm": False}, fine("expert_fc1", "moe_act") | recomputing("moe_act", "layernorm")),
        (EXPERTS | LATENT, fine(*DENSE, "moe_act") | recomputing("layernorm", "mla_up_proj", "mlp", "moe_act")),
        (EXPERTS | LATENT, {"cpu_offloading_num_layers": 3} | recomputing("mla_up_proj", "moe")),
    ],
)
def test_no_bit_changes(model: Any, settings: Any, traffic: Traffic) -> None:
    """Nor if a second forward pass comes before the first backward pass, as in a pipeline."""
    offloaded = build(**model, **settings)
    for in_order in (True, False):
        assert_equal(gradients(offloaded, in_order), plain(**model))
    assert traffic.returned > 0


def kept(traffic: Traffic, **settings: Any) -> tuple[float, float]:
    """Returns the hidden states that one micro-batch sends to the host, and those that it has to fetch."""
    traffic.sent = traffic.returned = 0
    loss_of(build(**settings)).backward()
    return traffic.sent / HIDDEN, traffic.returned / HIDDEN


def test_what_the_flags_name_is_offloaded(traffic: Traffic) -> None:
    # The last layer is still on the device when its backward begins.
    assert kept(traffic, **fine("attn_norm")) == (LAYERS, LAYERS - 1)
    assert kept(traffic, **fine("attn_proj")) == (LAYERS, LAYERS - 1)
    assert kept(traffic, **fine("attn_norm"), fine_grained_offloading_max_inflight_offloads=0) == (LAYERS, LAYERS)
    assert kept(traffic, **fine("attn_norm"), fine_grained_offloading_max_inflight_offloads=2) == (LAYERS, LAYERS - 2)
    assert kept(traffic, **fine("attn_norm", "mlp_norm", activation_offload_fraction=0.5))[0] == LAYERS
    assert kept(traffic, **fine("attn_norm", "mlp_norm", activation_offload_fraction=0.0)) == (0, 0)
    assert kept(traffic, **fine("attn_norm", min_offloaded_tensor_size=HIDDEN // 8 + 1)) == (0, 0)
    assert kept(traffic, **fine("attn_norm", min_offloaded_tensor_size=HIDDEN // 8))[0] == LAYERS
    # Full recomputation keeps nothing but inputs of layers, one hidden state each.
    assert kept(traffic, cpu_offloading_num_layers=2, **UNIFORM) == (2, 2)
    everything = kept(traffic, cpu_offloading_num_layers=1)[0]
    assert kept(traffic, **fine(*DENSE))[0] / LAYERS < everything < 30


def test_memory_on_the_device_is_freed() -> None:
    model = build(**fine(*DENSE))
    storages: list[SavedStorage] = []
    add = SavedStorage.start_offload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedStorage, "start_offload", lambda storage: (storages.append(storage), add(storage))[1])
        loss = loss_of(model)
    on_device = [storage._storage is not None for storage in storages]
    assert on_device == sorted(on_device) and on_device.count(True) == len(storages) // LAYERS
    loss.backward()


def test_a_later_pipeline_rank_offloads_less(traffic: Traffic) -> None:
    model, words = build(), fine("attn_norm", delta_offload_bytes_across_pp_ranks=2 * HIDDEN)
    config = dataclasses.replace(model.config, **words)
    offload_activations(model.decoder, config, cast(Any, SimpleNamespace(rank=lambda axis: 1)))
    loss_of(model).backward()
    assert traffic.sent == HIDDEN * (LAYERS - 2)


def test_a_copied_model_and_a_forward_without_gradients(traffic: Traffic) -> None:
    model = build(**fine("attn_norm", "core_attn"))
    with torch.no_grad():
        loss_of(model)
    assert traffic.sent == 0
    loss_of(model)
    assert_equal(gradients_of_a_copy(model), exact_gradients.gradients(build()))
