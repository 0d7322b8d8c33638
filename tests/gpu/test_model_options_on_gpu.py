"""Model options on a GPU: models give a CPU's numbers, and attention in chunks uses the kernel of documents."""

from typing import Any

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ops.activation import gelu_erf
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.kernels_in_use import attention_of_layer
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.gpu

ROPE = {"position_embedding_type": "rope"}
NONE = {"position_embedding_type": "none"}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sandwich, bounded, two bases": (
        {
            "norm_placement": "sandwich",
            "qk_layernorm": True,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "embedding_multiplier": 1.7,
            "window_size": (6, 0),
            "window_attn_skip_freq": 2,
            "rotary_base_local": 100.0,
        },
        ROPE,
    ),
    "all heads normed, norms behind, yarn": (
        {
            "normalization": "RMSNorm",
            "norm_placement": "post",
            "qk_layernorm": True,
            "qk_norm_scope": "full",
            "rope_scaling_type": "yarn",
            "rope_scaling_original_length": 8,
        },
        ROPE,
    ),
    "chunks, queries that grow, a gate, dynamic": (
        {
            "attention_chunk_size": 7,
            "attention_chunk_skip_freq": 2,
            "no_rope_freq": 2,
            "qk_l2_norm": True,
            "nope_temperature_scale": 0.5,
            "nope_temperature_floor": 3,
            "attention_output_gate": True,
            "rope_scaling_type": "dynamic",
            "rope_scaling_original_length": 8,
        },
        ROPE,
    ),
    "norms with weights for each head, rows of length 1": (
        {
            "norm_bias": False,
            "first_input_norm": False,
            "qk_layernorm": True,
            "qk_norm_scope": "per_head",
            "normalize_output_weight": True,
            "gated_linear_unit": True,
            "activation_func": gelu_erf,
        },
        ROPE,
    ),
    "ALiBi, side by side": (
        {"alibi": True, "norm_placement": "parallel", "norm_bias": False, "residual_multiplier": 0.6},
        NONE,
    ),
}


def build(settings: dict[str, Any], model: dict[str, Any]) -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, fp64=True, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3, **settings,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, spec, vocab_size=61, max_sequence_length=24, **model)


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_gives_a_cpus_numbers(name: str) -> None:
    ids = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(0))
    found = {}
    for device in ("cpu", "cuda"):
        model = build(*MODELS[name]).to(device)
        logits = model(ids.to(device))
        logits.square().mean().backward()
        found[device] = [logits.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]
    for ours, theirs in zip(found["cuda"], found["cpu"], strict=True):
        assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max()  # cosines agree to float32


@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_go_by_the_kernel_of_documents(rows: int) -> None:
    sizes = {"num_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "attention_dropout": 0.0, "bf16": True}
    config = TransformerConfig(attention_chunk_size=100, num_query_groups=2, **sizes)
    layer = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    ours = torch.cuda.get_device_capability() >= (9, 0)
    kernel = "our flash attention" if ours else "variable-length flash"
    assert attention_of_layer(layer, torch.device("cuda"), packed=True).why.startswith(kernel)
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(384, rows, n, 64, generator=generator).cuda().bfloat16().requires_grad_() for n in (4, 2, 2)]
    wide = [tensor.detach().double().requires_grad_() for tensor in heads]
    unfused = TransformerConfig(attention_chunk_size=100, num_query_groups=2, **{**sizes, "bf16": False, "fp64": True})
    reference = DotProductAttention(unfused, 1, AttnMaskType.causal, "self")
    results = [layer(*heads), reference(*wide)]
    gradient = torch.randn(results[0].shape, generator=generator).cuda()
    gradients = [torch.autograd.grad(y, x, gradient.to(y.dtype)) for y, x in zip(results, (heads, wide), strict=True)]
    for ours, theirs in zip([results[0], *gradients[0]], [results[1], *gradients[1]], strict=True):
        assert (ours.double() - theirs).abs().max() < 2e-2 * theirs.abs().max()
