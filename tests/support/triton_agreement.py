"""Compares Triton kernels with their torch definitions in float64, in a process with TRITON_INTERPRET=1 or on a GPU."""

import itertools

import torch

from megatron.core.ops.attention.blocks import merge_block
from megatron.core.ops.attention.max_logits import max_attention_logits
from megatron.core.ops.attention.max_logits_triton import max_attention_logits_triton
from megatron.core.ops.attention.merge_triton import merge_block_triton
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.ops.cross_entropy_triton import cross_entropy_triton
from megatron.core.ops.dropout.dropout import Draw, DropoutRngPosition, bias_dropout_add, dropout_tokens, keep_rows
from megatron.core.ops.dropout.dropout_triton import bias_dropout_add_triton, keep_rows_triton
from megatron.core.tokens import RngPosition, Tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def masks() -> None:
    iteration = torch.tensor(2**33 + 7, device=DEVICE)
    for bits, rows, count in ((32, 8, 17), (32, 2, 1300), (16, 33, 17), (16, 2, 1300)):
        draw = Draw((3123456789, 3987654321), iteration, 0.37, bits)
        row = torch.arange(rows, device=DEVICE) * 3 + 2**33
        first = torch.arange(rows, device=DEVICE) + 5
        arguments = (draw, row, row >> 32, first, count)
        assert torch.equal(keep_rows(*arguments), keep_rows_triton(*arguments)), (bits, rows, count)


def bias_dropout_residual() -> None:
    tokens = dropout_tokens(Tokens(2, 2, random=RngPosition(12, 7, 100)), DEVICE)
    place = DropoutRngPosition(tokens, 3, "mlp")
    narrow = itertools.product((torch.float32, torch.bfloat16), (True, False), (None, torch.float32), (70,))
    for dtype, bias, residual, width in (*narrow, (torch.float16, True, torch.float16, 1030)):
        found = run(bias_dropout_add_triton, dtype, bias, residual, width, place)
        same, exact = (run(bias_dropout_add, dtype, bias, residual, width, place, wide) for wide in (False, True))
        for ours, plain, expected in zip(found, same, exact, strict=True):
            if ours is not None:
                assert ours.dtype == plain.dtype
                # Triton's interpreter truncates to bfloat16 instead of rounding.
                tolerance = {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(ours.dtype, 1e-6)
                assert (expected - ours).abs().max() <= tolerance * expected.abs().max(), (dtype, bias, residual, width)


def run(function, dtype, bias, residual, width, place, wide=False) -> list[torch.Tensor | None]:
    """Output and gradients. `wide`: of the same numbers in float64."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator).to(DEVICE, dtype)
        return (numbers.double() if wide else numbers).requires_grad_()

    x = leaf(4, width, dtype=dtype)
    b = leaf(width, dtype=dtype) if bias else None
    r = leaf(4, width, dtype=residual) if residual else None
    output = function(x, b, r, 0.3, place)
    stream = torch.promote_types(dtype, residual) if residual else dtype
    output.backward(torch.randn(4, width, generator=generator).to(DEVICE, stream).to(output.dtype))
    return [output, x.grad, b.grad if bias else None, r.grad if residual else None]


def losses() -> None:
    for dtype, rows, columns, vocab_size in ((torch.float32, 5, 40, 37), (torch.bfloat16, 2, 5000, 4999)):
        generator = torch.Generator().manual_seed(0)
        logits = (torch.randn(rows, columns, generator=generator) * 5).to(DEVICE, dtype)
        logits[:, vocab_size:] = 100.0
        labels = torch.randint(vocab_size, (rows,), generator=generator).to(DEVICE)
        labels[1] = -100
        weight = torch.rand(rows, generator=generator).to(DEVICE)
        results = []
        for function, overwrite in (
            (cross_entropy, False),
            (cross_entropy_triton, False),
            (cross_entropy_triton, True),
        ):
            leaf = (logits.double() if function is cross_entropy else logits.clone()).requires_grad_()
            loss = function(leaf * 1.0, labels, vocab_size, overwrite_logits=overwrite)
            (loss * weight).sum().backward()
            results.append((loss, leaf.grad))
        for loss, gradient in results[1:]:
            assert (loss - results[0][0]).abs().max() < 1e-5 * results[0][0].abs().max() and loss[1] == 0
            tolerance = 2**-7 if dtype is torch.bfloat16 else 1e-5  # bfloat16: one unit in the last place
            assert (gradient - results[0][1]).abs().max() < tolerance * weight.max()
            assert not gradient[1].any() and not gradient[:, vocab_size:].any()
        beyond = torch.full_like(labels, vocab_size)
        assert cross_entropy_triton(logits, beyond, vocab_size).isnan().all()


def merged_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, b, a, width, dtype in ((37, 2, 3, 40, torch.float32), (16, 1, 2, 64, torch.bfloat16)):
        total = torch.randn(rows + 9, b, a, width, generator=generator).to(DEVICE)
        total_lse = torch.randn(b, a, rows + 9, generator=generator).mul(9).to(DEVICE)
        output = torch.randn(b, a, rows, width, generator=generator).to(DEVICE, dtype).permute(2, 0, 1, 3)
        lse = torch.randn(b, a, rows, 1, generator=generator).mul(9).to(DEVICE)[..., 0]
        total_lse[0, 0, 5:8] = lse[0, 1, :3] = -torch.inf  # queries that saw no key so far, or see none now
        lse[0, 0, 0] = total_lse[0, 1, 4] = -torch.inf
        results = []
        for function, wide in ((merge_block, torch.float64), (merge_block_triton, torch.float32)):
            ours = total.to(wide, copy=True), total_lse.to(wide, copy=True)
            block = (output.double(), lse.double()) if wide is torch.float64 else (output, lse)
            function(ours[0][4:-5], ours[1][..., 4:-5], *block)
            results.append(ours)
        for expected, found in zip(*results, strict=True):
            finite = expected.isfinite()
            assert torch.equal(finite, found.isfinite()) and not found.isnan().any()
            assert (expected - found)[finite].abs().max() < 1e-5 * expected[finite].abs().max()


def largest_logits(every: int = 1) -> None:
    """Queries and keys of packed projections; rows and widths that do not fill a tile; every rule that hides keys. Each
    key head has one key with positive products, so the answer is the last query that sees it. With `every` 3 it checks
    the last case and each third one before it."""
    causal, draw, groups = AttentionVariant(0.3, causal=True), torch.Generator().manual_seed(0), 6
    plain, mask = AttentionCall(), torch.arange(300, device=DEVICE)[None, None, None] % 5 > 1
    cu_seqlens = torch.tensor([0, 130, 131, 250], device=DEVICE)
    documents, order = AttentionCall(cu_seqlens=cu_seqlens), torch.randperm(300, generator=draw)[None].to(DEVICE)
    dtypes = (torch.float32,) if DEVICE.type == "cpu" else (torch.float32, torch.bfloat16)  # as the interpreter can
    cases = (
        (129, 129, 2, 24, causal, plain),
        (40, 300, 1, 64, causal, plain),
        (300, 300, 1, 40, AttentionVariant(0.3, causal=False), AttentionCall(mask=mask)),
        (300, 300, 1, 16, AttentionVariant(0.3, causal=True, window=(150, 0)), plain),
        (300, 300, 1, 16, AttentionVariant(0.3, causal=False, window=(150, 3)), documents),
        (300, 300, 1, 80, causal, documents),
        (130, 300, 1, 16, causal, AttentionCall(query_positions=order[:, :130])),
        (130, 300, 1, 16, causal, AttentionCall(query_positions=order[:, 130:260], cu_seqlens=cu_seqlens)),
    )
    for sq, sk, b, width, variant, call in cases[(len(cases) - 1) % every :: every]:
        for dtype in dtypes:
            heads = 2 * groups if b == 2 else groups
            packed = torch.randn(sk, b, heads + groups, width, generator=draw).abs().to(DEVICE, dtype)
            packed *= (1.0 + torch.arange(sk, device=DEVICE) / 100)[:, None, None, None].to(dtype)
            query, key = packed[:sq, :, groups:], -packed[:, :, :groups]
            for head, place in enumerate((0, 63, 64, 110, 127, sk - 1)):
                key[place, :, head] *= -9
            expected = max_attention_logits(query.double(), key.double(), variant, call)
            found = max_attention_logits_triton(query, key, variant, call)
            tolerance = 1e-5 if dtype is torch.float32 else 2**-6
            assert found.dtype is torch.float32 and found.shape == (heads,)
            assert ((found - expected).abs() <= tolerance * expected.abs()).all(), (width, variant, found, expected)
    query[7, 0, 1, 3] = torch.nan
    assert max_attention_logits_triton(query, key, variant, call).isnan().nonzero().tolist() == [[1]]
    nothing = AttentionCall(mask=torch.ones(1, 1, 1, 300, dtype=torch.bool, device=DEVICE))
    assert max_attention_logits_triton(query, key, causal, nothing).isneginf().all()
    expected = max_attention_logits(query[:130], -key.abs(), causal, plain)
    assert torch.allclose(
        max_attention_logits_triton(query[:130], -key.abs(), causal, plain), expected, 2**-6, equal_nan=True
    )


if __name__ == "__main__":
    masks()
    losses()
    bias_dropout_residual()
    merged_blocks()
    largest_logits()
    print("agree")
