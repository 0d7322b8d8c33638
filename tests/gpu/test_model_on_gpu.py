"""The model on a GPU: kernels against their definitions, types, dropout masks, and no step that waits for the host."""

import math

import pytest
import torch
import torch.nn.functional as F
from support import elementwise_kernels, recurrent_kernels, triton_agreement
from torch import Tensor

from megatron.core.inference.generation import generate
from megatron.core.inference.sampling import GREEDY
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ops.attention.kernels import SDPA_CUDA, SDPA_CUDNN, SDPA_FLASH, UNFUSED, VARLEN
from megatron.core.ops.attention.sdpa import first_usable_kernel
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.gpu

LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
}
ROPE = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def test_triton_kernels_equal_their_definitions() -> None:
    triton_agreement.masks()
    triton_agreement.losses()
    triton_agreement.bias_dropout_residual()
    triton_agreement.merged_blocks()
    triton_agreement.largest_logits()


@pytest.mark.parametrize(
    "check",
    [
        *("sums", "norms", "norms_of_views", "norms_with_residual", "positions", "biases"),
        *("normed_positions", "heads_of_a_projection", "gated_outputs"),
        *("table_rows", "updates", "stored_updates"),
    ],
)
def test_elementwise_kernels_equal_their_definitions(check: str) -> None:
    getattr(elementwise_kernels, check)()


@pytest.mark.parametrize("check", ["convolutions", "gated_norms", "projections", "scans", "rounded_scans"])
def test_kernels_of_recurrent_layers_equal_their_definitions(check: str) -> None:
    getattr(recurrent_kernels, check)()


def qkv(s: int, b: int, a: int, g: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(s, b, a, d), (s, b, g, d), (s, b, g, d)]
    return [torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kernel", [SDPA_CUDA, SDPA_CUDNN, SDPA_FLASH, UNFUSED], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("sizes", [(256, 2, 4, 4, 64), (384, 1, 8, 2, 128)])
def test_attention(kernel, sizes: tuple[int, ...]) -> None:
    variant = AttentionVariant(1 / math.sqrt(sizes[-1]), causal=True)
    agree(kernel.compute, qkv(*sizes, torch.bfloat16), variant, AttentionCall())


@pytest.mark.parametrize("widths", [(192, 128), (24, 16), (64, 96)])
@pytest.mark.parametrize("kernel", [SDPA_CUDA, SDPA_CUDNN, SDPA_FLASH, VARLEN, UNFUSED], ids=lambda kernel: kernel.name)
def test_values_of_another_width(kernel, widths: tuple[int, int]) -> None:
    query, key, value = qkv(256, 1, 4, 4, max(widths), torch.bfloat16)
    query, key, value = (
        heads.detach()[..., :width].requires_grad_()  # views, as latent attention has them
        for heads, width in zip((query, key, value), (widths[0], widths[0], widths[1]), strict=True)
    )
    edges = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda") if kernel is VARLEN else None
    variant, call = AttentionVariant(widths[0] ** -0.5, causal=True), AttentionCall(cu_seqlens=edges, max_seqlen=156)
    if kernel is SDPA_CUDNN and first_usable_kernel(widths[0], 4, 4, torch.bfloat16, widths[1]) != "cuDNN":
        with pytest.raises(RuntimeError):  # what was asked for by name has no other way out
            kernel.compute(query, key, value, variant, call)
    else:
        agree(kernel.compute, [query, key, value], variant, call)


@pytest.mark.parametrize("window", [None, (50, 0)])
@pytest.mark.parametrize("kernel", [VARLEN, UNFUSED], ids=lambda kernel: kernel.name)
def test_attention_to_packed_documents(kernel, window: tuple[int, int] | None) -> None:
    cu_seqlens = torch.tensor([0, 100, 100, 101, 256], dtype=torch.int32, device="cuda")
    variant = AttentionVariant(0.1, causal=True, window=window)
    agree(kernel.compute, qkv(256, 1, 4, 2, 64, torch.bfloat16), variant, AttentionCall(None, None, cu_seqlens, 155))


@pytest.mark.parametrize("window", [None, (50, 0)])
def test_attention_with_a_mask(window: tuple[int, int] | None) -> None:
    mask = torch.rand(2, 1, 128, 128, device="cuda") < 0.3
    mask[:, :, range(128), range(128)] = False
    variant = AttentionVariant(0.1, causal=True, window=window)
    agree(SDPA_CUDA.compute, qkv(128, 2, 4, 2, 64, torch.bfloat16), variant, AttentionCall(mask=mask))


def agree(compute, inputs: list[Tensor], variant: AttentionVariant, call: AttentionCall) -> None:
    """Output and gradients equal those of float64 to the precision of the type."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected, result = attention(*exact, variant, call), compute(*inputs, variant, call)
    dy = torch.randn(expected.shape, device="cuda", dtype=torch.float64)
    wanted = torch.autograd.grad(expected, exact, dy)
    given = torch.autograd.grad(result, inputs, dy.to(result.dtype))
    for a, e in zip([result, *given], [expected, *wanted], strict=True):
        assert a.dtype is inputs[0].dtype and (a - e).abs().max() < 2e-2 * e.abs().max()


def test_cudnn_comes_first() -> None:
    assert first_usable_kernel(64, 12, 12, torch.bfloat16) == "cuDNN"
    assert first_usable_kernel(128, 32, 8, torch.bfloat16) == "cuDNN"


def build(settings: dict, model: dict, device: str, **more) -> GPTModel:
    settings = {"hidden_dropout": 0.1, "attention_dropout": 0.1} | settings | more
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, use_cpu_initialization=True, **settings
    )
    gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=1000, max_sequence_length=128, **model)
    return gpt.to(device)


def step(model: GPTModel, tokens: Tokens, b: int, s: int, device: str) -> list[Tensor]:
    ids = torch.randint(1000, (b, s + 1), generator=torch.Generator().manual_seed(1)).to(device)
    loss = model(ids[:, :-1], labels=ids[:, 1:], tokens=tokens)
    loss.mean().backward()
    return [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("settings, model", [({}, {}), (LLAMA, ROPE)])
@pytest.mark.parametrize("fp64", [True, False])
def test_gpu_equals_cpu_with_dropout(settings: dict, model: dict, packed: bool, fp64: bool) -> None:
    # Masks are functions of their place, so that the devices drop the same. Rotary angles are float32 for any
    # type of the model, and the devices' sines and cosines of them differ in the last place.
    tolerance = 1e-4 if not fp64 else 1e-7 if model is ROPE else 1e-11
    results = []
    for device in ("cpu", "cuda"):
        random = RngPosition(5, 3, first_sample=8)
        tokens, b = Tokens(96, 2, random=random), 2
        if packed:
            cu_seqlens = torch.tensor([0, 30, 96], dtype=torch.int32, device=device)
            tokens, b = Tokens(96, 1, cu_seqlens=cu_seqlens, max_seqlen=66, random=random), 1
        results.append(step(build(settings, model, device, fp64=fp64), tokens, b, 96, device))
    for ours, expected in zip(results[1], results[0], strict=True):
        assert (ours - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("settings, model", [({}, {}), (LLAMA, ROPE)])
def test_a_half_precision_step_does_not_wait(settings: dict, model: dict, packed: bool, drop: float) -> None:
    drops = {"hidden_dropout": drop, "attention_dropout": drop}
    gpt = build(settings, model, "cuda", bf16=True, **drops)
    reference = step(build(settings, model, "cuda", fp64=True, **drops), *record(packed), 96, "cuda")
    ids = torch.randint(1000, (record(packed)[1], 97), generator=torch.Generator().manual_seed(1)).cuda()
    tokens, _ = record(packed)
    iteration, first_sample = (torch.tensor(number, device="cuda") for number in (3, 8))
    place = Tokens(**{**vars(tokens), "random": RngPosition(5, iteration, first_sample)})
    for attempt in range(2):  # the first compiles kernels and fills caches
        gpt.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            loss = gpt(ids[:, :-1], labels=ids[:, 1:], tokens=place)
            loss.mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.dtype is torch.float32
    assert (loss.cpu() - reference[0]).abs().max() < 0.02 * reference[0].abs().max()
    for parameter, expected in zip(gpt.parameters(), reference[1:], strict=True):
        assert parameter.grad.dtype is torch.bfloat16
        assert (parameter.grad.cpu() - expected).norm() < 0.05 * expected.norm()


def record(packed: bool) -> tuple[Tokens, int]:
    random = RngPosition(5, 3, 8)
    if not packed:
        return Tokens(96, 2, random=random), 2
    cu_seqlens = torch.tensor([0, 30, 96], dtype=torch.int32, device="cuda")
    return Tokens(96, 1, cu_seqlens=cu_seqlens, max_seqlen=66, random=random), 1


def test_generation_on_a_gpu_equals_a_cpu() -> None:
    prompts = [[3, 7, 1], [5], [9, 2, 8, 30]]
    written = [generate(build(LLAMA, ROPE, d, fp64=True), prompts, 20, GREEDY) for d in ("cpu", "cuda")]
    assert written[0] == written[1]
