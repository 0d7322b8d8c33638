"""Cross entropy under Megatron-LM's name, with one rank; `ops/test_cross_entropy_over_ranks` has several."""

import torch

from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def test_the_loss_of_each_token() -> None:
    logits = torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 6], [-1, 3], [2, 2]])
    losses = vocab_parallel_cross_entropy(logits, labels)
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses, plain.view(3, 2))
    assert losses[1, 0] == 0.0
    losses.sum().backward()
    assert logits.grad is not None and not logits.grad[1, 0].any()


def test_columns_that_pad_take_no_part_and_half_precision_gives_float32() -> None:
    logits = torch.randn(3, 2, 8).bfloat16()
    logits[..., 7] = 100.0
    labels = torch.zeros(3, 2, dtype=torch.int64)
    losses = vocab_parallel_cross_entropy(logits, labels, vocab_size=7)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses, vocab_parallel_cross_entropy(logits[..., :7].contiguous(), labels))
