"""Which kernel a call of an attention layer gets, and what is said when it is not the planned one."""

import logging
from types import SimpleNamespace

import pytest
import torch

from megatron.core.attention_plan import plan_attention
from megatron.core.backends import LOCAL
from megatron.core.exceptions import UserError
from megatron.core.ops.attention.kernels import SDPA_CPU, SDPA_CUDA, UNFUSED, Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import warn

MASK = torch.zeros(1, 1, 7, 7, dtype=torch.bool)
EDGES = torch.tensor([0, 3, 7], dtype=torch.int32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_mask_with_packed_documents_takes_the_unfused_kernel_and_says_so_once(
    packed: bool, masked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn._warn_once.cache_clear()
    config = SimpleNamespace(params_dtype=torch.float32, attention_backend=AttnBackend.auto)
    plan = plan_attention(LOCAL, AttentionVariant(1.0, True), config)
    call = AttentionCall(mask=MASK if masked else None, cu_seqlens=EDGES if packed else None)
    with caplog.at_level(logging.WARNING):
        kernels = [plan.kernel_of(Situation("cpu", torch.float32, True, packed), call) for _ in range(2)]
    expected = UNFUSED if packed and masked else SDPA_CPU
    assert kernels == [expected, expected]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if packed and masked else 0)
    assert all("an attention mask with packed documents" in line for line in said)


def test_padding_needs_a_kernel_that_takes_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto)
    for backend, kernel in ((AttnBackend.auto, SDPA_CUDA), (AttnBackend.unfused, UNFUSED)):
        config.attention_backend = backend
        plan = plan_attention(LOCAL, AttentionVariant(1.0, False, padded=True), config)
        assert plan.choices[Situation("cuda", torch.bfloat16, True, False)].kernel is kernel
    config.attention_backend = AttnBackend.flash
    plan = plan_attention(LOCAL, AttentionVariant(1.0, False, padded=True), config)  # on a CPU the log says it
    assert "plain torch, because" in plan.describe("cuda") and "takes no mask of padding" in plan.describe("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"takes no mask of padding.*attention_backend to auto or unfused"):
        plan_attention(LOCAL, AttentionVariant(1.0, False, padded=True), config)
