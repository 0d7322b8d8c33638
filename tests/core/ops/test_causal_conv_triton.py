"""The kernel of the causal convolution, in Triton's interpreter."""

import pytest
from support import recurrent_kernels

from megatron.core.ops import causal_conv_triton


@pytest.mark.parametrize("check", ["convolutions", "convolutions_of_many_taps", "projections"])
def test_the_kernel_agrees_with_its_reference(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_conv_triton, "_TOKENS", 4)  # the interpreter takes a millisecond for each
    getattr(recurrent_kernels, check)()
