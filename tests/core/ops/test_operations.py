"""The records of this folder: every operation has a kernel for GPUs."""

import pytest
import torch

from megatron.core.ops.norm import layer_norm, rms_norm
from megatron.core.ops.operations import LossOps, MatrixOps, NormOps, RecurrenceOps, every_norm
from megatron.core.ops.records import ByDevice, Ops


@pytest.mark.parametrize("record", [LossOps, MatrixOps, NormOps, RecurrenceOps])
def test_every_operation_has_a_kernel_for_gpus(record: type[Ops]) -> None:
    plain, ours = vars(record()), vars(record.by_triton())
    noting = ours.pop("noting")
    assert all(isinstance(own, ByDevice) and own.cpu is plain[name] is not own.cuda for name, own in ours.items())
    assert set(noting) == {name for name in ours if name.endswith("_with_residual")}


def test_norms_without_a_residual_return_their_input() -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)
    norms = NormOps(**every_norm(layer_norm, rms_norm))
    normed, residual = norms.rms_norm_with_residual(x, weight, 1e-5)
    assert residual is x and torch.equal(normed, rms_norm(x, weight, 1e-5))
    normed, residual = norms.layer_norm_with_residual(x, weight, weight, 1e-5)
    assert residual is x and torch.equal(normed, layer_norm(x, weight, weight, 1e-5))
