"""Which kernels compute a model, and the lines of the log about them."""

from typing import Any

import pytest
import torch
from support.fake_transformer_engine import FAKE
from support.tiny_models import tiny_config, tiny_gpt

from megatron.core import backends
from megatron.core.ops.attention.kernels import SDPA_CUDA
from megatron.core.transformer import kernels_in_use as module
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.kernels_in_use import AttentionInUse, BackendInUse, attention_of_layer, kernels_in_use


def test_kernels_in_use_are_told() -> None:
    model = tiny_gpt(tiny_config(attention_dropout=0.1, window_size=(3, 0), window_attn_skip_freq=2))
    backend, attention = kernels_in_use(model, torch.device("cpu"))
    assert isinstance(backend, BackendInUse) and backend.name == "local"
    assert isinstance(attention, AttentionInUse) and attention.layers == (1, 2) and not attention.crosses
    assert attention.kernels == ("plain torch", "SDPA (CPU flash)")
    assert [str(backend), str(attention)] == [
        "backend local: plain torch except dropout masks",
        "attention of layers 1 to 2 on cpu: training: plain torch, because SDPA (CPU flash) cannot draw the "
        "masks of attention dropout 0.1 (--attention-dropout 0 is faster); evaluation: SDPA (CPU flash)",
    ]


def test_linear_layers_in_pieces_are_not_said_to_be_transformer_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_engine", lambda: FAKE)
    shared: dict[str, Any] = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "transformer_impl": "transformer_engine",
    }
    cut, whole = (tiny_config(**shared, tp_comm_overlap=overlap) for overlap in (True, False))
    lines = [
        str(next(kernels_in_use(DotProductAttention(each, 1, AttnMaskType.causal, "self"), torch.device("cpu"))))
        for each in (cut, whole)
    ]
    assert lines[0] == lines[1] + "; ours, too: linear layers whose products are cut (--tp-comm-overlap)"
    assert lines[1].startswith("backend transformer_engine fake: its linear layers")


def test_on_a_gpu_the_kernel_that_torch_selects_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "first_usable_kernel", lambda *sizes: "flash")
    half = {"fp64": False, "bf16": True, "params_dtype": torch.bfloat16}
    layer = DotProductAttention(tiny_config(**half), 1, AttnMaskType.causal, "self", backend=backends.LOCAL)
    found = attention_of_layer(layer, torch.device("cuda"))
    assert layer.plan.describe("cuda") == SDPA_CUDA.name and found.kernels == ("SDPA (flash)", "SDPA (flash)")
    assert str(found) == "attention of layer 1 on cuda: SDPA (flash)"
