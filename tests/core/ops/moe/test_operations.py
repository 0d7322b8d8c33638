"""The record of experts: every operation has a kernel for GPUs."""

from megatron.core.ops.moe.operations import ExpertOps
from megatron.core.ops.records import ByDevice


def test_every_operation_has_a_kernel_for_gpus() -> None:
    plain, ours = vars(ExpertOps()), vars(ExpertOps.by_triton())
    assert set(ours.pop("noting")) == {"weighted_activation", "permute", "unpermute"}
    assert all(isinstance(own, ByDevice) and own.cpu is plain[name] is not own.cuda for name, own in ours.items())
