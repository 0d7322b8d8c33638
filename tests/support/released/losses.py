"""The loss functions of Megatron-LM's entry scripts, by what they return."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.released.facts import Facts
from torch import Tensor
from torch.nn.functional import cross_entropy


def token_sums(loss_mask: Tensor, losses: Tensor) -> Tensor:
    """Returns the sum of the losses of tokens that count, and their number."""
    mask = loss_mask.flatten().float()
    return torch.stack([losses.flatten().float() @ mask, mask.sum()])


def context_size(facts: Facts, scales: bool) -> int:
    """Returns the number of ranks that share a sequence, if the script reads it for its loss."""
    return facts.args.context_parallel_size if scales else 1


def sum_over_context(facts: Facts, size: int, sums: Tensor) -> None:
    """Adds up the sums of the ranks that share a sequence. The gradient is that of this rank's sums."""
    if "get_context_parallel_group" in facts:
        group = facts.call("get_context_parallel_group")
        if size > 1:
            dist.all_reduce(sums, group=group)


def check(facts: Facts, loss: Tensor) -> None:
    """Fails if the loss is not a number, if the run asks for it."""
    if "args.check_for_nan_in_loss_and_grad" not in facts or not facts.args.check_for_nan_in_loss_and_grad:
        return
    if "get_rerun_state_machine" not in facts:
        assert not loss.isnan().any()
        return
    machine = facts.call("get_rerun_state_machine")

    def validate(rejects: Any, fatal: bool) -> None:
        facts.through(
            facts.read(machine, "RerunStateMachine.validate_result"),
            "RerunStateMachine.validate_result",
            result=loss,
            rejection_func=rejects,
            message="the loss is rejected",
            tolerance=0.0,
            fatal=fatal,
        )

    validate(torch.isnan, True)
    if "is_spiky_loss" in facts:
        spiky = partial(facts.read(machine, "is_spiky_loss"), threshold=0.2)
    else:
        spiky = partial(facts.read(machine, "is_unexpectedly_large"), threshold=10, context="loss")
    spiky(loss.detach())
    if facts.args.check_for_spiky_loss:
        validate(spiky, False)


def mean_loss(facts: Facts, scales: bool, loss_mask: Tensor, losses: Tensor) -> tuple[Any, ...]:
    """Returns a mean loss, and its mean over the data parallel ranks."""
    sums, size = token_sums(loss_mask, losses), context_size(facts, scales)
    sum_over_context(facts, size, sums)
    loss = sums[0] / sums[1]
    check(facts, loss)
    (reported,) = facts.call("average_losses_across_data_parallel_group", [loss])
    return loss * size, {"lm loss": reported}


def summed_loss(facts: Facts, scales: bool, loss_mask: Tensor, losses: Tensor) -> tuple[Any, ...]:
    """Returns a sum of losses, the number of tokens, and both over the data parallel ranks."""
    sums, size = token_sums(loss_mask, losses), context_size(facts, scales)
    sum_over_context(facts, size, sums)
    check(facts, sums[0])
    reported = sums.detach().clone()
    dist.all_reduce(reported, group=facts.call("get_data_parallel_group"))
    return sums[0] * size, sums[1].detach().int(), {"lm loss": tuple(reported)}


def local_loss(facts: Facts, scales: bool, loss_mask: Tensor, losses: Tensor, model: Any = None) -> tuple[Any, ...]:
    """Returns a sum of losses and the number of tokens of this rank."""
    sums, size = token_sums(loss_mask, losses), context_size(facts, scales)
    check(facts, sums[0])
    return sums[0] * size, sums[1].detach().int(), {"lm loss": sums.detach().clone()}


LOSSES = {"mean": mean_loss, "summed": summed_loss, "local": local_loss}
"""By `Conventions.loss`."""


def bert_loss(
    facts: Facts, loss_mask: Tensor, swapped: Tensor, output: tuple[Tensor, Tensor | None]
) -> tuple[Any, ...]:
    """Returns the sum of the mean losses of masked tokens and of the segments' order, and both for the report."""
    losses, in_order = output
    total, count = token_sums(loss_mask, losses)
    parts = {"lm loss": total / count}
    if in_order is not None:
        parts["sop loss"] = cross_entropy(in_order.flatten(0, -2).float(), swapped.flatten(), ignore_index=-1)
    means = facts.call("average_losses_across_data_parallel_group", [*parts.values()])
    return sum(parts.values()), dict(zip(parts, means, strict=True))
