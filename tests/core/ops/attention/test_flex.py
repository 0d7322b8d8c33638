"""flex_attention computes the definition: rules about scores and keys, as torch computes them without its compiler. It
has no backward on a CPU; tests/gpu/test_attention_on_gpu.py compares gradients."""

import pytest
import torch
from torch import Tensor

from megatron.core.attention_plan import plan_attention
from megatron.core.backends import LOCAL
from megatron.core.ops.attention import flex
from megatron.core.ops.attention.alibi import alibi_slopes
from megatron.core.ops.attention.flex import flex_attention_cuda
from megatron.core.ops.attention.kernels import FLEX, UNFUSED, Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

EDGES = torch.tensor([0, 1, 12, 12, 31], dtype=torch.int32)  # tokens behind the last boundary
MASK = (torch.arange(37) >= torch.tensor([30, 37])[:, None])[:, None, None]


def heads(sq: int, b: int, sk: int = 37) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sq, b, 4, 16), (sk, b, 2, 16), (sk, b, 2, 12)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.slow_cases("variant0-call0-37-2", "variant1-call1-20-2", "variant4-call4-30-2")
@pytest.mark.parametrize(
    ("variant", "call", "sq", "b"),
    [
        (AttentionVariant(0.3, True), AttentionCall(), 37, 2),
        (AttentionVariant(0.3, False), AttentionCall(), 20, 2),
        (AttentionVariant(0.3, True, cap=1.5), AttentionCall(), 20, 2),
        (AttentionVariant(0.3, False, window=(9, 4)), AttentionCall(), 37, 1),
        (AttentionVariant(0.3, True, slopes=alibi_slopes(8), cap=2.0), AttentionCall(first_head=2), 30, 2),
        (AttentionVariant(0.3, True, sink=True), AttentionCall(sink=torch.tensor([0.5, -1.0, 2.0, 0.0])), 37, 2),
        (AttentionVariant(0.3, True), AttentionCall(cu_seqlens=EDGES), 37, 1),
        (AttentionVariant(0.3, False, window=(4, 2)), AttentionCall(cu_seqlens=EDGES), 37, 1),
        (AttentionVariant(0.3, True, chunk=8), AttentionCall(cu_seqlens=torch.tensor([0, 8, 16, 24, 32, 37])), 37, 2),
        (AttentionVariant(0.3, False, padded=True), AttentionCall(mask=MASK), 37, 2),
        (AttentionVariant(0.3, True, padded=True), AttentionCall(mask=MASK[:1], cu_seqlens=EDGES[:4]), 37, 1),
    ],
)
def test_it_computes_the_definition(variant: AttentionVariant, call: AttentionCall, sq: int, b: int) -> None:
    given = heads(sq, b)
    sees_keys = slice(None) if call.mask is None or call.cu_seqlens is None else slice(0, 30)
    for _ in range(2):  # the second time with the mask that was kept
        found = flex_attention_cuda(*given, variant, call)
        # Slopes are float32.
        torch.testing.assert_close(found[sees_keys], attention(*given, variant, call)[sees_keys], rtol=1e-6, atol=1e-6)


def test_a_mask_belongs_to_its_boundaries() -> None:
    """The kept mask of one micro-batch is not used for the next, even if its boundaries have the same address."""
    variant, given = AttentionVariant(0.3, True), heads(37, 1)
    for cut in (5, 9, 20):
        call = AttentionCall(cu_seqlens=torch.tensor([0, cut, 37]))
        torch.testing.assert_close(flex_attention_cuda(*given, variant, call), attention(*given, variant, call))
        del call
    assert len(flex._LAST) <= 8
    call = AttentionCall(cu_seqlens=torch.tensor([0, 5, 37]))
    for cut in (5, 20):  # a script may write the next boundaries into the same tensor
        assert call.cu_seqlens is not None
        call.cu_seqlens[1] = cut
        torch.testing.assert_close(flex_attention_cuda(*given, variant, call), attention(*given, variant, call))


def test_it_is_used_on_a_gpu_if_it_is_named() -> None:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    config = TransformerConfig(**sizes, attention_backend=AttnBackend.flex)
    plan = plan_attention(LOCAL, AttentionVariant(1.0, True, cap=3.0), config)
    for packed in (False, True):
        assert plan.choices[Situation("cuda", torch.float32, True, packed)].kernel is FLEX
    assert plan.kernel_of(Situation("cuda", torch.float32, True, False), AttentionCall(mask=MASK), 8) is FLEX
    positions = AttentionCall(query_positions=torch.zeros(1, 4, dtype=torch.int64))
    assert plan.kernel_of(Situation("cuda", torch.float32, True, False), positions, 8) is UNFUSED
    dropped = plan_attention(LOCAL, AttentionVariant(1.0, True, dropout=0.1), config).describe("cuda")
    assert "flex_attention cannot draw the masks of attention dropout 0.1" in dropped
    assert "flex" not in plan.describe("cpu")
