"""Triton kernels that permute tokens, in Triton's interpreter."""

import pytest
from support import expert_kernels

from megatron.core.ops.moe import permute_triton


@pytest.mark.parametrize("check", ["moves", "places"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(expert_kernels, check)()


def test_copies_made_token_by_token_agree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permute_triton, "BY_TOKEN", not permute_triton.BY_TOKEN)
    expert_kernels.moves()
