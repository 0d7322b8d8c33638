"""Which backend a layer gets, which implementation a device gets, and what the log says."""

import logging
from typing import Any

import pytest
import torch
from support.fake_transformer_engine import FAKE

from megatron.core import backends
from megatron.core.backends import LOCAL, backend_of_layer, choose_backend, fp8_settings, triton_backend
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.transformer_engine.engine import unused_line, why_layers_stay_ours
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import warn


def configured(**settings: Any) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, **settings})


def test_without_a_gpu_the_backend_is_local() -> None:
    assert choose_backend(configured(transformer_impl="auto")) is LOCAL
    assert choose_backend(ModelParallelConfig()) is LOCAL


@pytest.mark.parametrize(
    ("asked", "has_triton", "name"), [("auto", True, "triton"), ("local", True, "local"), ("auto", False, "local")]
)
def test_with_a_gpu_it_is_triton_unless_asked_otherwise(
    asked: str, has_triton: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if not has_triton:
        monkeypatch.setattr(backends, "triton_backend", lambda: None)
    assert choose_backend(configured(transformer_impl=asked)).name == name


def test_triton_is_refused_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = configured(transformer_impl="triton")
    assert choose_backend(asked).name == "triton"
    monkeypatch.setattr(backends, "triton_backend", lambda: None)
    with pytest.raises(UserError, match="--transformer-impl triton: Triton cannot be imported; install it"):
        choose_backend(asked)
    assert choose_backend(configured(transformer_impl="auto")) is LOCAL


def test_the_log_names_what_is_not_plain_torch() -> None:
    assert LOCAL.describe("cpu") == "backend local: plain torch except dropout masks"
    assert LOCAL.describe("cuda") == "backend local: plain torch"
    backend = triton_backend()
    assert backend is not None
    assert backend.describe("cuda") == (
        "backend triton: its own kernels for biases, embeddings, norms, rotary positions, attention, dropout masks, "
        "dropout, convolutions, gated delta nets, state spaces, losses, experts, activations; plain torch for the rest"
    )
    assert backend.describe("cpu") == "backend triton: plain torch except dropout masks"


def test_layers_with_tensorwise_scaling_use_kernels_that_note_the_largest_values() -> None:
    own = triton_backend()
    assert own is not None
    layer = backend_of_layer(own, configured(fp8="hybrid", fp8_recipe="tensorwise"), 1, ProcessGroupCollection(cp=None))
    changed = {
        name
        for record, kept in zip(layer.records().values(), own.records().values(), strict=True)
        for name, function in vars(record).items()
        if function is not vars(kept)[name]
    }
    assert changed == {
        *("rms_norm_with_residual", "layer_norm_with_residual", "permute", "unpermute", "weighted_activation")
    }
    assert layer.experts.permute.cuda.keywords == {"notes_largest": True}  # type: ignore[attr-defined]
    assert layer.experts.permute.cpu is own.experts.permute.cpu  # type: ignore[attr-defined]
    others = backend_of_layer(own, configured(fp8="hybrid", fp8_recipe="blockwise"), 1, ProcessGroupCollection(cp=None))
    assert others.records() == own.records()


def test_layers_at_both_ends_can_stay_out_of_fp8() -> None:
    ends = {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 1}
    config = configured(num_layers=6, fp8="e4m3", first_last_layers_bf16=True, **ends)
    numbers = [number for number in range(1, 7) if fp8_settings(config, number, LOCAL.fp8_kernels) is not None]
    assert numbers == [3, 4, 5]
    assert fp8_settings(configured(), 3, LOCAL.fp8_kernels) is None


def test_transformer_engine_is_used_if_asked_for_and_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_engine", lambda: FAKE)
    config = configured(transformer_impl="transformer_engine")
    backend = choose_backend(config)
    assert backend.engine is FAKE and choose_backend(configured()) is LOCAL
    assert backend.describe("cpu").startswith("backend transformer_engine fake: its linear layers, norms, attention")


def test_a_library_that_asks_for_transformer_engine_hears_once_why_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn._warn_once.cache_clear()
    monkeypatch.setattr(warn, "_left_out", set())
    config = configured(transformer_impl="transformer_engine")
    monkeypatch.setattr(backends, "find_engine", lambda: "it cannot be imported (no such file)")
    with caplog.at_level(logging.WARNING):
        assert choose_backend(config) is LOCAL and choose_backend(config) is LOCAL
        assert choose_backend(configured()) is LOCAL
    assert [record.getMessage() for record in caplog.records] == [unused_line("it cannot be imported (no such file)")]
    caplog.clear()
    warn._warn_once.cache_clear()
    warn.leave_out([unused_line("it cannot be imported (no such file)")])  # a run prints it among its notes
    with caplog.at_level(logging.WARNING):
        assert choose_backend(config) is LOCAL
    assert not caplog.records


@pytest.mark.parametrize(
    "settings",
    [
        {"fp8": "hybrid", "recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"cuda_graph_impl": "local"},
        {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_margin": 1},
        {"fp8": "hybrid", "fp8_wgrad": False},
    ],
)
def test_ours_compute_what_its_layers_cannot_do(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_engine", lambda: FAKE)
    config = configured(**settings, transformer_impl="transformer_engine")
    assert choose_backend(config) is LOCAL and why_layers_stay_ours(config)


@pytest.mark.parametrize(
    ("settings", "recomputes"),
    [
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]}, False),
        ({"recompute_granularity": "selective"}, False),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act", "moe"]}, True),
        ({"moe_layer_recompute": True}, True),
    ],
)
def test_delayed_scaling_forbids_only_to_recompute_products(settings: dict, recomputes: bool) -> None:
    config = configured(num_moe_experts=2, fp8="hybrid", fp8_recipe="delayed", **settings)
    assert (why_layers_stay_ours(config) is not None) == recomputes
