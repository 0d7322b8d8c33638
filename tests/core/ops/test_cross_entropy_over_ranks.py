"""Cross entropy over a vocabulary that is cut over ranks, against torch's over all of it; and the head before it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.boxes import error
from support.pool import Pool
from torch import Tensor

from megatron.core.communication.traffic import recorded
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

TOKENS = 6


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3) as pool:
        yield pool


def problem(columns: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [t, all columns] whose padding would win, labels of which one counts for nothing, and a weight of each."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(TOKENS, columns, dtype=torch.float64, generator=generator) * 3).to(dtype)
    logits[:, vocab_size:] = 50.0
    labels = torch.randint(vocab_size, (TOKENS,), generator=generator)
    labels[2] = -100
    return logits, labels, torch.rand(TOKENS, dtype=torch.float64, generator=generator)


def group_of(size: int) -> Any:
    return ProcessGroupCollection.from_grid(RankGrid(size, tensor=size), dist.get_rank()).tp


def parted(size: int, vocab_size: int, columns: int, smoothing: float, kernel: str, overwrite: bool) -> dict[str, Any]:
    rank, group = dist.get_rank(), group_of(size)
    if kernel == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
        from megatron.core.ops.cross_entropy_triton import cross_entropy_triton as function
    else:
        function = cross_entropy
    logits, labels, weight = problem(size * columns, vocab_size, torch.float32 if kernel == "triton" else torch.float64)
    whole = logits[:, :vocab_size].double().requires_grad_()
    expected = F.cross_entropy(whole, labels, reduction="none", label_smoothing=smoothing)
    (expected * weight).sum().backward()
    own = logits[:, rank * columns :][:, :columns].contiguous().requires_grad_()
    with recorded() as forward:
        loss = function(
            own * 1.0,
            labels,
            vocab_size,
            label_smoothing=smoothing,
            overwrite_logits=overwrite,
            group=group,
        )
    with recorded() as backward:
        (loss * weight).sum().backward()
    wanted = F.pad(whole.grad, (0, size * columns - vocab_size))[:, rank * columns :][:, :columns]
    beyond = function(own.detach().clone(), torch.full_like(labels, vocab_size), vocab_size, group=group)
    return {
        "loss": error(loss.detach().double(), expected.detach()),
        "gradient": ((own.grad - wanted).abs().max() / whole.grad.abs().max()).item(),
        "losses": loss.tolist(),
        "sent": [(traffic.operation, traffic.nbytes) for traffic in forward],
        "quiet": not backward,
        "beyond": bool(beyond.isnan().all()),
    }


@pytest.mark.slow_cases("2-9-17-triton-0.0-1e-06-True", "3-4-5-triton-0.0-1e-06-False")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("kernel", "smoothing", "tolerance"), [("torch", 0.0, 1e-14), ("torch", 0.3, 1e-14), ("triton", 0.0, 1e-6)]
)
# 17 of 2 x 9 columns; 5 of 3 x 4, so that the last rank has nothing but padding.
@pytest.mark.parametrize(("ranks", "columns", "vocab_size"), [(2, 9, 17), (3, 4, 5)])
def test_parts_of_a_vocabulary(
    ranks: int,
    columns: int,
    vocab_size: int,
    kernel: str,
    smoothing: float,
    tolerance: float,
    overwrite: bool,
    pool: Pool,
) -> None:
    results = pool.run(parted, ranks, ranks, vocab_size, columns, smoothing, kernel, overwrite)
    width, numbers = (4, 2) if kernel == "triton" else (8, 3 if smoothing else 2)
    for result in results:
        assert result["loss"] < tolerance and result["gradient"] < tolerance, result
        assert result["losses"] == results[0]["losses"] and result["losses"][2] == 0.0
        # Two or three numbers a token from each rank; nothing in backward.
        assert result["sent"] == [("all_gather", ranks * numbers * TOKENS * width)] and result["quiet"]
        assert result["beyond"]


def megatron_lm() -> float:
    rank = dist.get_rank()
    logits, labels, _ = problem(18, 18, torch.float64)
    loss = vocab_parallel_cross_entropy(
        logits.view(3, 2, 18)[..., rank * 9 :][..., :9], labels.view(3, 2), 0.1, tp_group=group_of(2)
    )
    return error(loss, F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1).view(3, 2))


def test_public_function(pool: Pool) -> None:
    assert max(pool.run(megatron_lm, 2)) < 1e-14


# ---------------------------------------------------------------------------------------------------------------------


def smoothed_after_a_head(vocab_size: int, columns: int) -> tuple[float, float]:
    """Largest differences of losses and gradients from torch's label smoothing over the true vocabulary, when padding
    is -inf, as in a model's logits."""
    rank, group = dist.get_rank(), group_of(3)
    logits, labels, weight = problem(3 * columns, vocab_size, torch.float64)
    whole = logits[:, :vocab_size].clone().requires_grad_()
    expected = F.cross_entropy(whole, labels, reduction="none", label_smoothing=0.1)
    (expected * weight).sum().backward()
    logits[:, vocab_size:] = -torch.inf
    own = logits[:, rank * columns :][:, :columns].contiguous().requires_grad_()
    losses = vocab_parallel_cross_entropy(own[:, None], labels[:, None], 0.1, tp_group=group)[:, 0]
    (losses * weight).sum().backward()
    assert whole.grad is not None and own.grad is not None
    mine = F.pad(whole.grad, (0, 3 * columns - vocab_size))[:, rank * columns :][:, :columns]
    return (losses - expected).abs().max().item(), (own.grad - mine).abs().max().item()


@pytest.mark.parametrize(("vocab_size", "columns"), [(10, 5), (15, 5), (7, 3)])
def test_label_smoothing_leaves_out_columns_of_minus_infinity(pool: Pool, vocab_size: int, columns: int) -> None:
    for differences in pool.run(smoothed_after_a_head, 3, vocab_size, columns):
        assert max(differences) < 1e-12
