"""fp8 on a GPU: kernels equal their definitions bit for bit, products equal emulated ones, and a step does not wait."""

import itertools
from collections.abc import Callable

import pytest
import torch
from support import fp8_kernels, fp8_weights
from support.runs import differences, state_at_end, train
from torch import nn

from megatron.core.backends import LOCAL, Backend, triton_backend
from megatron.core.ops.fp8 import cublaslt
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.linear import Fp8Linear
from megatron.core.ops.fp8.product import accumulate_product, accumulate_product_cuda, product_cuda
from megatron.core.ops.fp8.quantize import Quantized
from megatron.core.ops.fp8.recipes import DelayedScaling, Fp8Settings, LinearSplit, Role, finish_step

pytestmark = pytest.mark.gpu

RECIPES = ("tensorwise", "delayed", "blockwise")


@pytest.mark.parametrize("check", ["largest_values", "casts", "by_largest", "blocks", "values_that_are_not_finite"])
def test_kernels_equal_their_definitions(check: str) -> None:
    getattr(fp8_kernels, check)()


@pytest.mark.parametrize("check", fp8_weights.CHECKS)
def test_kernels_of_gathered_weights_equal_their_definitions(check: Callable[[], None]) -> None:
    check()


GRAPHS = "--cuda-graph-warmup-steps 2 --no-check-for-nan-in-loss-and-grad"


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize(
    "more",
    [
        "",
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm",
        f"--cuda-graph-impl local --cuda-graph-scope full_iteration {GRAPHS}",
    ],
)
def test_weights_only_in_fp8_change_no_bit(recipe: str, more: str) -> None:
    flags = (
        "--mock-data --hidden-size 256 --ffn-hidden-size 512 --seq-length 128 --max-position-embeddings 128 --swiglu "
        "--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --bf16 --deterministic-mode --train-iters 6 "
        f"--fp8-format hybrid --fp8-recipe {recipe} {more}"
    )
    plain, gathered = (train(f"{flags} {flag}") for flag in ("", "--fp8-param-gather"))
    assert plain.losses == gathered.losses
    assert differences(state_at_end([plain]), state_at_end([gathered])) == []


def gradients(backend: Backend, recipe: str, name: str, tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x, w, dy = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in ((tokens, 512), (1024, 512), (tokens, 1024))
    )
    weight, x = nn.Parameter(w), x.requires_grad_()
    layer = Fp8Linear(Fp8Settings(recipe, FORMATS[name], kernels=backend.fp8_kernels), LinearSplit(), weight)
    for _ in range(2):  # the second is warm, for delayed scaling
        x.grad = weight.grad = None
        output = layer(x, weight)
        output.backward(dy)
        finish_step_of(layer)
    assert x.grad is not None and weight.grad is not None
    return [output.detach(), x.grad, weight.grad]


def finish_step_of(layer: Fp8Linear) -> None:
    if isinstance(layer.scaling, DelayedScaling):
        finish_step([layer.scaling])


def test_many_layers_take_a_step_as_each_alone() -> None:
    settings = Fp8Settings("delayed", FORMATS["hybrid"], history_len=4, amax_algo="max")
    together, alone = (
        [DelayedScaling(settings, LinearSplit(), torch.device("cuda")) for _ in range(300)] for _ in range(2)
    )
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(6):
        values = torch.randn(300, 3, generator=generator, device="cuda").mul_(9.0).exp2_()
        values.view(-1)[step::7] = (0.0, torch.inf, torch.nan)[step % 3]
        for layers in (together, alone):
            for layer, seen in zip(layers, values, strict=True):
                layer.gradient_share = 1 / 3
                for role in Role:
                    layer.seen_of(role).copy_(seen[role])
        finish_step(together)
        for layer in alone:
            layer.add_step(layer.take_seen())
        for ours, exact in zip(together, alone, strict=True):
            assert torch.equal(ours.amax_history, exact.amax_history)
            for role in Role:
                assert torch.equal(ours.factor_of(role), exact.factor_of(role))
                scale = ours.scale_of(role)
                assert scale is not None and torch.equal(ours.factor_of(role), 1.0 / scale)


@pytest.mark.parametrize(("recipe", "name"), itertools.product(RECIPES, FORMATS))
@pytest.mark.parametrize("tokens", [512, 200])
def test_products_equal_emulated_ones(recipe: str, name: str, tokens: int) -> None:
    backend = triton_backend()
    assert backend is not None
    for ours, exact in zip(
        gradients(backend, recipe, name, tokens), gradients(LOCAL, recipe, name, tokens), strict=True
    ):
        error = (ours.double() - exact.double()).norm() / exact.double().norm()
        assert error < 0.005, (recipe, name, float(error))  # sums of fewer bits, rounded to bfloat16


@pytest.mark.parametrize(("out", "width", "tokens"), [(6144, 4096, 8192), (512, 1024, 16), (48, 16, 4096)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_added_in_one_kernel(out: int, width: int, tokens: int, name: str) -> None:
    torch.manual_seed(1)
    total = torch.randn(out, width, device="cuda")
    left = Quantized(torch.randn(out, tokens, device="cuda").to(FORMATS[name].gradients), torch.tensor(0.1).cuda())
    right = Quantized(torch.randn(width, tokens, device="cuda").to(torch.float8_e4m3fn), torch.tensor(3.0).cuda())
    expected, separate = total.clone(), total.clone()
    accumulate_product(expected, left, right)
    separate += product_cuda(left, right, torch.float32)
    assert cublaslt.is_available()
    assert cublaslt.accumulate_product(total, left.values, right.values, left.factors, right.factors)
    torch.testing.assert_close(total, separate, rtol=1e-4, atol=1e-3 * tokens**0.5)
    torch.testing.assert_close(total, expected, rtol=1e-3, atol=3e-3 * tokens**0.5)
    accumulate_product_cuda(separate, left, right)
    accumulate_product_cuda(total, left, right)
    torch.testing.assert_close(total, separate, rtol=1e-4, atol=1e-3 * tokens**0.5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_does_not_wait_for_the_host(recipe: str) -> None:
    backend = triton_backend()
    assert backend is not None
    weight = nn.Parameter(torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = Fp8Linear(Fp8Settings(recipe, FORMATS["hybrid"], kernels=backend.fp8_kernels), LinearSplit(), weight)
    for _ in range(2):
        layer(x, weight).sum().backward()
        finish_step_of(layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, weight).sum().backward()
        finish_step_of(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
