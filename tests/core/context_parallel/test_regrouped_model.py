"""A whole model under dynamic context parallelism, with documents on 1, 2 and 4 ranks at the same time, against one
process: loss and every gradient in float64."""

import contextlib
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core.context_parallel.test_gpt_model import gpt
from support.processes import run_on_ranks
from support.split_rows import VOCABULARY
from torch import Tensor, nn

from megatron.core.communication.collectives import Pending
from megatron.core.context_parallel import cut_rows, sequence_part
from megatron.core.context_parallel.regrouping import padded_length, regroup
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.reductions import Reduction
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.parameters import info_of
from megatron.core.tokens import Tokens

LENGTHS = [9, 31, 2, 7, 13, 1, 12, 18, 8, 5]
ROOM = 8
UNEVEN = [16, 8, 8, 8, 8, 8]
"""Ranks 0 and 1 share the first document. Only rank 0 has another one then."""
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped keys": {"num_query_groups": 2},
    "window, sinks": {"window_size": (4, 0), "softmax_type": "learnable"},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
}


def add_gradients(
    model: nn.Module,
    documents: Sequence[int],
    groups: ProcessGroupCollection | None,
    num_ranks: int,
    of_all: Sequence[int] = LENGTHS,
) -> Tensor:
    """Returns the weighted sum of this rank's losses of some documents, after its backward."""
    each = [torch.Generator().manual_seed(number) for number in documents]
    drawn = [torch.randint(VOCABULARY, (2, of_all[n]), generator=g) for n, g in zip(documents, each, strict=True)]
    lengths = [of_all[number] for number in documents]
    length = padded_length(sum(lengths), num_ranks, 1)
    if sum(lengths) < length:
        lengths.append(length - sum(lengths))
        drawn.append(torch.full((2, lengths[-1]), -1))
    ids, labels = torch.cat(drawn, 1)
    weight = torch.where(labels < 0, 0.0, labels.double() / 7)
    positions = torch.cat([torch.arange(count) for count in lengths])
    rows = [row[None] for row in (ids.clamp(min=0), labels.clamp(min=0), weight, positions)]
    part = None if groups is None else sequence_part(groups, num_ranks)
    if part is not None:
        rows = [cut_rows(row, part, 1) for row in rows]
    ids, labels, weight, positions = rows
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = Tokens(ids.shape[1], 1, part, positions, bounds, max(lengths))
    loss = (model(ids, labels=labels, tokens=tokens) * weight).sum()
    loss.backward()
    return loss.detach()


def found_in(model: GPTModel, loss: Tensor) -> dict[str, Tensor]:
    return {"loss": loss, **{info_of(p).name: p.grad for p in model.parameters() if p.grad is not None}}


def on_rank(context: int) -> tuple[list[dict[str, Tensor]], list[int]]:
    """The sums over all ranks for each variant, and the numbers of ranks that shared this rank's micro-batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroupCollection.from_grid(RankGrid(ranks, context=context), rank)
    plan = regroup(LENGTHS, ranks, ROOM, 4)
    own = [one for one in plan if one.first_rank <= rank < one.first_rank + one.num_ranks]
    results = []
    for variant in VARIANTS.values():
        model = gpt(groups, hybrid_context_parallel=True, max_seqlen_per_dp_cp_rank=ROOM, **variant)
        losses = [add_gradients(model, list(one.documents), groups, one.num_ranks) for one in own]
        found = found_in(model, torch.stack(losses).sum())
        for value in found.values():
            dist.all_reduce(value)
        results.append(found)
    with pytest.raises(UserError, match=r"tokens.part is SequencePart\(rank=0, size=3, group=None\), but this rank"):
        model(torch.zeros(1, 4, dtype=torch.int64), tokens=Tokens(4, 1, type(sequence_part(groups, 2))(0, 3)))
    return results, [one.num_ranks for one in own]


@pytest.mark.fast("2")  # tests/training/test_dynamic_context_parallel.py has a run without context parallel ranks
@pytest.mark.parametrize("context", [1, 2])
def test_documents_on_1_2_and_4_ranks_equal_one_process(context: int) -> None:
    ranks = run_on_ranks(on_rank, 4, context)
    assert {width for _, widths in ranks for width in widths} == {1, 2, 4}
    alone = ProcessGroupCollection.from_grid(RankGrid(1), 0)
    for number, variant in enumerate(VARIANTS.values()):
        model = gpt(alone, **variant)
        expected = found_in(model, add_gradients(model, [*range(len(LENGTHS))], None, 1))
        for results, _ in ranks:
            assert results[number].keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(results[number][name], value, rtol=1e-11, atol=1e-11, msg=name)


def reduce_at_once() -> tuple[list[int], dict[str, Tensor]]:
    """Two steps whose reductions overlap the last backward, on ranks with different numbers of micro-batches. A rank
    does nothing else until its reduction is done, as a GPU may that has one queue for all of NCCL's kernels.

    Returns the widths of this rank's micro-batches, and the gradients.
    """
    signal.alarm(120)  # ends a rank that waits for ever
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroupCollection.from_grid(RankGrid(ranks), rank)
    plan = regroup(UNEVEN, ranks, ROOM, 4)
    own = [one for one in plan if one.first_rank <= rank < one.first_rank + one.num_ranks]
    model = gpt(groups, hybrid_context_parallel=True, max_seqlen_per_dp_cp_rank=ROOM, calculate_per_token_loss=True)
    overlaps = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True, bucket_size=1)
    wrapped = DistributedDataParallel(model.config, overlaps, model, pg_collection=groups)
    start = Reduction.start_all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reduction, "start_all_reduce", lambda *arguments: finished(start(*arguments)))
        for _ in range(2):  # the first one counts the contributions to each bucket
            wrapped.zero_grad_buffer()
            for number, one in enumerate(own):
                is_last = number == len(own) - 1
                with contextlib.nullcontext() if is_last else wrapped.no_sync():
                    add_gradients(wrapped, one.documents, groups, one.num_ranks, UNEVEN)
            wrapped.finish_grad_sync()
    signal.alarm(0)
    return [one.num_ranks for one in own], {info_of(p).name: p.main_grad.clone() for p in model.parameters()}


def finished(pending: Pending) -> Pending:
    return Pending(pending.wait(), None)


def test_ranks_with_fewer_micro_batches_do_not_wait_for_the_ranks_they_share_one_with() -> None:
    ranks = run_on_ranks(reduce_at_once, 4)
    assert [widths for widths, _ in ranks] == [[2, 1], [2], [1, 1], [1, 1]]
    alone = gpt(ProcessGroupCollection.from_grid(RankGrid(1), 0))
    for number in range(len(UNEVEN)):
        add_gradients(alone, [number], None, 1, UNEVEN)
    for _, found in ranks:
        for parameter in alone.parameters():
            assert parameter.grad is not None
            name = info_of(parameter).name
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-11, atol=1e-11, msg=name)
