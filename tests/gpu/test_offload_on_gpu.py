"""Activations and optimizer state in host memory on a GPU: every bit stays, memory leaves the device, nothing waits."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, host_state
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LENGTH, ROWS, WIDTH, LAYERS = 256, 4, 512, 6
NAMES = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
FINE: dict[str, Any] = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
NORMS: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp_act"]}
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_grouped_gemm": True}


def trained(model: dict[str, Any], **optimizer: Any) -> tuple[list[Tensor], int]:
    """Returns weights and main weights after three steps, and the peak of the memory in the last, above what is
    allocated when it begins. From the second step on the host may not wait."""
    gc.collect()  # a model of an earlier call that is freed during the measured step would count as memory of this one
    torch.manual_seed(0)
    config = TransformerConfig(
        **{"num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4, "bf16": True} | model,
        params_dtype=torch.bfloat16,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    gpt = GPTModel(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), 1024, LENGTH)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), Float16Module(config, gpt.cuda()))
    settings: dict[str, Any] = {"lr": 1e-3, "clip_grad": 1.0, "bf16": True, "params_dtype": torch.bfloat16}
    update = get_megatron_optimizer(OptimizerConfig(**settings | optimizer), [chunk])
    ids = torch.randint(1024, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3)).cuda()
    positions = torch.arange(LENGTH, device="cuda").expand(ROWS, -1)
    watches = config.num_moe_experts is None
    try:
        for step in range(3):
            if step == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            torch.cuda.set_sync_debug_mode("error" if step and watches else "default")
            chunk.zero_grad_buffer()
            loss = chunk(ids[:, :-1], positions, None, labels=ids[:, 1:].contiguous())
            loss.float().mean().backward()
            chunk.finish_grad_sync()
            update.step_on_device()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    states = [one for chunk_ in update.state_chunks() for one in (chunk_.values().cpu().clone(),)]
    return [*states, *(parameter.detach().cpu().clone() for parameter in chunk.parameters())], peak


@pytest.mark.parametrize(
    ("model", "offloaded"),
    [
        ({}, FINE | {"offload_modules": NAMES}),
        (NORMS, FINE | {"offload_modules": ["attn_norm", "mlp_norm", "attn_proj"]}),
        ({}, {"cpu_offloading_num_layers": LAYERS - 1}),
        (EXPERTS, FINE | {"offload_modules": ["core_attn", "expert_fc1", "moe_act"]}),
    ],
)
def test_activations(model: dict[str, Any], offloaded: dict[str, Any]) -> None:
    plain, peak = trained(model)
    assert all(map(torch.equal, plain, trained(model)[0])), "a run that does not repeat itself shows nothing"
    found, less = trained(model | offloaded)
    assert all(map(torch.equal, plain, found)) and len(plain) == len(found)
    assert less < peak * 0.97, (less, peak)


@pytest.mark.parametrize("settings", [{}, {"use_precision_aware_optimizer": True}])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("in_file", [False, True])
def test_optimizer_state(
    settings: dict[str, Any], fraction: float, in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In host memory and in a file, which the host waits for without a wait for the device."""
    if in_file:
        settings = settings | {"optimizer_nvme_offload_path": str(tmp_path)}
    plain, _ = trained({}, **{name: value for name, value in settings.items() if name != "optimizer_nvme_offload_path"})
    gc.collect()
    before = torch.cuda.memory_allocated()
    monkeypatch.setattr(host_state, "PIECE", 1 << 16)
    found, _ = trained({}, **settings, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    assert all(map(torch.equal, plain, found)) and len(plain) == len(found)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
