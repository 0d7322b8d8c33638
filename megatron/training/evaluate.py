"""Evaluation: mean losses over a number of global batches, and how many tokens they cover."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, all_reduce
from megatron.core.exceptions import UserError
from megatron.training.data.step_data import is_end_of_data, step_data_of
from megatron.training.log.metrics import synchronization_allowed
from megatron.training.providers import NonLossFunctions


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation.

    On ranks that compute no loss (all pipeline stages but one) `losses` and `counts` are empty.
    """

    losses: Mapping[str, float]
    """Sum over count, both over every micro-batch of every data parallel rank, in float64."""
    counts: Mapping[str, float]
    """What each loss is the mean over: unmasked tokens; micro-batches for a loss that is reported as one value."""
    samples: int
    """Sequences put through the model by all data parallel ranks, padding included."""
    iterations: int
    interrupted: bool
    """`should_stop` ended it early; the result covers fewer batches than planned."""
    seconds: float
    non_loss_data: Any = None
    """What `NonLossFunctions` collected; None without them."""

    @property
    def tokens(self) -> int | None:
        """Number of tokens that the first loss is the mean over; None without a loss."""
        return round(next(iter(self.counts.values()))) if self.counts else None


@torch.no_grad()
def evaluate(
    forward_backward_func: Callable[..., Sequence[Mapping[str, Tensor]]],
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    model: Sequence[nn.Module],
    *,
    num_iterations: int,
    num_microbatches: int,
    micro_batch_size: int,
    seq_length: int,
    device: torch.device | str = "cpu",
    group: Group = None,
    data_parallel_size: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
    decoder_seq_length: int | None = None,
    non_loss: NonLossFunctions | None = None,
) -> EvaluationResult:
    """Runs `num_iterations` global batches forward and returns the mean losses. Reads the device only at the end.
    `StepData` begins again at its first sample, if it can.

    Args:
        forward_backward_func: from get_forward_backward_func; returns the report of each micro-batch.
        model: chunks; they are in eval mode during the call, and in their former mode afterwards.
        group: the data and context parallel ranks, whose batches differ; None: this rank alone.
        decoder_seq_length: tokens of the decoder's part of a sample, for a model with encoder and decoder.
        should_stop: called after every global batch but the last. Must return the same on all ranks.
        non_loss: which other data to collect after the last global batch, whose micro-batches the model sees again
            (those of a script's own iterator: the next ones). None, or an evaluation that stopped early: none.

    Raises UserError if there is nothing to evaluate: no iterations, or a data iterator that ends before them.
    """
    if num_iterations < 1:
        raise UserError(
            f"--eval-iters {num_iterations}: an evaluation needs at least one iteration; "
            "leave --eval-interval out to train without evaluation"
        )
    started = time.perf_counter()
    data = step_data_of(data_iterator)
    if data is not None:
        data.restart()
    sums: dict[str, Tensor] = {}
    done, collected = 0, None
    collects = non_loss is not None and non_loss.collect is None
    arguments: dict[str, Any] = {
        "forward_step_func": forward_step_func,
        "data_iterator": data_iterator,
        "model": list(model),
        "num_microbatches": num_microbatches,
        "seq_length": seq_length,
        **({} if decoder_seq_length is None else {"decoder_seq_length": decoder_seq_length}),
        "micro_batch_size": micro_batch_size,
        "forward_only": True,
    }
    keeping = data.keeping_step() if data is not None and collects else contextlib.nullcontext()
    with keeping, eval_mode(model):
        for done in range(1, num_iterations + 1):
            if data is not None:
                data.begin(data.iteration)  # drops the rest of a global batch that no chunk has read
            for report in _forward(forward_backward_func, done, num_iterations, **arguments):
                _add(sums, report, device)
            if done < num_iterations and should_stop():
                break
        if non_loss is not None and done == num_iterations:
            if non_loss.collect is not None:
                collected = non_loss.collect(list(model))
            else:
                if data is not None:
                    data.rewind()
                collected = _forward(forward_backward_func, done, done, **arguments, collect_non_loss_data=True)
    losses, counts = _mean(sums, group)
    return EvaluationResult(
        losses=losses,
        counts=counts,
        samples=done * num_microbatches * micro_batch_size * data_parallel_size,
        iterations=done,
        interrupted=done < num_iterations,
        seconds=time.perf_counter() - started,
        non_loss_data=collected,
    )


@contextlib.contextmanager
def eval_mode(model: Sequence[nn.Module]) -> Iterator[None]:
    """Puts model chunks into eval mode inside the context. Afterwards each of their modules has its former mode."""
    modes = [(module, module.training) for chunk in model for module in chunk.modules()]
    try:
        for chunk in model:
            chunk.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _forward(
    forward_backward_func: Callable[..., Sequence[Mapping[str, Tensor]]],
    iteration: int,
    planned: int,
    **arguments: object,
) -> Sequence[Mapping[str, Tensor]]:
    try:
        return forward_backward_func(**arguments)
    except (StopIteration, RuntimeError) as error:
        if is_end_of_data(error):
            raise UserError(
                f"the evaluation's data ended in iteration {iteration} of {planned}; "
                f"lower --eval-iters to {iteration - 1} or give more data"
            ) from error
        raise


def _add(sums: dict[str, Tensor], report: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Adds one micro-batch's [sum, count], or one value with the count 1, in float64."""
    for name, value in report.items():
        pair = value.detach().reshape(-1).to(device, torch.float64, non_blocking=True)
        assert pair.numel() in (1, 2), f"the report {name!r} has {pair.numel()} values, not 1 or 2"
        if pair.numel() == 1:
            pair = torch.cat([pair, torch.ones_like(pair)])
        sums[name] = sums[name] + pair if name in sums else pair.clone()


def _mean(sums: Mapping[str, Tensor], group: Group) -> tuple[dict[str, float], dict[str, float]]:
    """Returns losses and counts over all ranks, with one all-reduce and one copy to the host."""
    if not sums:
        return {}, {}
    totals = torch.stack(list(sums.values()))  # [names, 2]
    with synchronization_allowed(totals.device):
        all_reduce(totals, group)
        pairs = totals.tolist()
    losses, counts = {}, {}
    for name, (total, count) in zip(sums, pairs, strict=True):
        losses[name] = total / count if count else 0.0
        counts[name] = count
    return losses, counts


def full_pass(num_samples: int, global_batch_size: int) -> int:
    """Returns the number of global batches that contain every sample once (--full-validation). Raises UserError for an
    empty dataset."""
    if num_samples < 1:
        raise UserError(
            "--full-validation: the validation set is empty; give it a part in --split, or a --valid-data-path"
        )
    return -(-num_samples // global_batch_size)
