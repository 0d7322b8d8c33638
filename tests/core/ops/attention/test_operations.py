"""The record of attention: one operation in place of two, and flash attention, come with the kernels for GPUs."""

from megatron.core.ops.attention.operations import AttentionOps
from megatron.core.ops.records import ByDevice
from megatron.core.transformer.enums import AttnBackend


def test_every_operation_has_a_kernel_for_gpus() -> None:
    ours = vars(AttentionOps.by_triton())
    assert {name for name, own in ours.items() if not isinstance(own, ByDevice)} == {
        *("noting", "kernels", "block_kernels")
    }
    plain = AttentionOps()
    assert plain.normed_rope is None


def test_our_kernels_are_candidates() -> None:
    for kernels, count in (("kernels", 2), ("block_kernels", 1)):
        plain, ours = (vars(record)[kernels] for record in (AttentionOps(), AttentionOps.by_triton()))
        for asked in AttnBackend:
            added = {kernel.name for kernel in ours[asked]} - {kernel.name for kernel in plain[asked]}
            assert len(added) == count * (len(plain[asked]) > 1), asked
