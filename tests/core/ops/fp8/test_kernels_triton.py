"""Every operation of fp8 has a kernel for GPUs; the products choose by the device of quantised matrices."""

import torch

from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.kernels_triton import fp8_kernels_triton
from megatron.core.ops.fp8.product import emulated_product
from megatron.core.ops.fp8.quantize import quantize_by_largest
from megatron.core.ops.records import ByDevice


def test_every_operation_has_a_kernel_for_gpus() -> None:
    ours = fp8_kernels_triton()
    operations = {**vars(ours), **vars(ours.grouped), **vars(ours.weights)}
    left = {name for name, own in operations.items() if not isinstance(own, ByDevice)}
    assert left == {"product", "grouped", "weights"}


def test_products_of_a_cpu_are_plain_torch() -> None:
    matrix = torch.linspace(-2.0, 2.0, 32 * 16).view(32, 16)
    of = quantize_by_largest(matrix, FORMATS["e4m3"].inputs, 0, matrix.max(), rows=True, columns=False).rows
    assert of is not None
    expected = emulated_product(of, of, torch.float32, True)
    assert torch.equal(fp8_kernels_triton().product(of, of, torch.float32), expected)
