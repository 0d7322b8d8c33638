"""Compares the kernels of the gated delta rule with their definition in float64. Runs in Triton's interpreter, in
float32, or on a GPU, in bfloat16."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.delta_rule.attention import delta_rule_attention
from megatron.core.ops.delta_rule.attention_triton import delta_rule_attention_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
_ERROR = 5e-3 if ON_GPU else 5e-6
"""Largest length of the error of a result, relative to the result. Three operands of each product are rounded to
bfloat16 one after the other; fla's kernels have the same error."""
_ERROR_OF_DECAYS = 1e-2 if ON_GPU else 5e-5
"""That of gradients of decays, rates and biases, which are differences of sums over pairs of tokens. Measured on an
H200: up to 5e-3. Plain torch, whose inputs and results alone are bfloat16, has up to 3e-3."""


def arguments(length: int, batch: int, heads: tuple[int, int], widths: tuple[int, int], fast: float) -> list[Tensor]:
    """Returns random arguments. Fading and strength are views of a projection; decays are `fast` times as fast."""
    (groups, shared), (key_width, value_width) = heads, widths
    generator = torch.Generator().manual_seed(length)
    sizes = [2 * key_width + shared * value_width, shared * value_width, shared, shared]
    projected = torch.randn(length, batch, groups, sum(sizes), generator=generator).to(DEVICE, DTYPE)
    mixed, _, strength, fading = projected.split(sizes, -1)
    mixed = F.silu(mixed + 0.3)
    if length > 2:
        mixed[2, 0, 0, : 2 * key_width] = 0.0  # a query and a key without a direction
    rate = (torch.rand(groups * shared, generator=generator) * 15 * fast + 1).log().to(DEVICE, DTYPE)
    bias = torch.randn(groups * shared, generator=generator).to(DEVICE, DTYPE)
    return [mixed, fading - 2.0, strength, rate, bias]


def results(function, tensors, widths, document, wide=False) -> list[Tensor]:
    """Returns the output and the gradients. `wide`: of the same numbers in float64."""
    leaves = [(tensor.double() if wide else tensor).detach().requires_grad_() for tensor in tensors]
    output = function(*leaves, widths, document)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)
    output.backward(weight.to(output.dtype))
    return [output, *(leaf.grad for leaf in leaves)]


def agrees(length, batch, heads, widths, document=None, fast=1.0) -> None:
    tensors = arguments(length, batch, heads, widths, fast)
    exact = results(delta_rule_attention, tensors, widths, document, wide=True)
    ours = results(delta_rule_attention_triton, tensors, widths, document)
    for number, (found, expected, given) in enumerate(zip(ours, exact, [tensors[0], *tensors], strict=True)):
        assert found.dtype is given.dtype and found.shape == expected.shape
        # Those of rates and biases are sums over tokens, in which much cancels.
        size = expected.norm() if number < 4 else torch.maximum(expected.norm(), exact[2].norm())
        error = (found.double() - expected).norm()
        limit = _ERROR_OF_DECAYS if number in (2, 4, 5) else _ERROR
        assert error <= limit * size, (number, length, widths, float(error), float(size))


def documents(length: int, every: int, also: int) -> Tensor:
    token = torch.arange(length, device=DEVICE)
    return token // every + (token >= also)


def rows() -> None:
    """One token, whole chunks, chunks and a part; heads that share keys; widths that fill no tile; fast decays."""
    agrees(1, 1, (1, 1), (16, 16))
    agrees(64, 1, (1, 3), (16, 8))
    agrees(150, 2, (2, 2), (12, 20))
    agrees(200, 1, (1, 1), (32, 16), fast=4.0)


def packed() -> None:
    """Borders at and between those of chunks, and several of them in one chunk."""
    agrees(128, 1, (1, 2), (16, 16), documents(128, 64, 65))
    agrees(150, 2, (1, 1), (16, 16), documents(150, 23, 128))
    agrees(140, 1, (1, 1), (16, 16), documents(140, 130, 3))


def published_widths() -> None:
    """Widths of published models. In the interpreter one of them."""
    for widths in ((64, 64), (128, 128), (64, 128), (128, 64), (256, 256)) if ON_GPU else ((64, 128),):
        agrees(333 if ON_GPU else 70, 1, (2, 2) if ON_GPU else (1, 1), widths)


def long_rows() -> None:
    agrees(4096, 2, (2, 2), (128, 128), documents(4096, 1500, 77))


def the_same_bits_again() -> None:
    """Several widths, and memory that held something else before."""
    for length, widths in ((1000, (128, 128)), (333, (256, 256)), (64, (16, 8))):
        tensors = arguments(length, 2, (4, 2), widths, 1.0)
        first = results(delta_rule_attention_triton, tensors, widths, None)
        for _ in range(4):
            torch.full((1 << 24,), float("nan"), device=DEVICE)  # is freed at once
            again = results(delta_rule_attention_triton, tensors, widths, None)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), widths
