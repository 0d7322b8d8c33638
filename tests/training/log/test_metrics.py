"""Device metrics against a plain computation on the host."""

import math

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks
from support.step_results import step
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.training.log.finite import GradientProbe
from megatron.training.log.metrics import StepMetrics

NOT_APPLIED = torch.tensor(False)
INFINITE = torch.tensor(math.inf)


def report(total, count, name="lm loss"):
    return {name: torch.tensor([total, count], dtype=torch.float32)}


def recorded(metrics, *arguments, **values):
    """Records a step whose update was not applied and whose gradient norm is infinite, if nothing else is said."""
    metrics.record(*step(*arguments, **{"update_applied": NOT_APPLIED, "grad_norm": INFINITE} | values))


def test_loss_is_weighted_by_tokens_within_and_plain_over_iterations():
    metrics = StepMetrics("cpu")
    metrics.record(*step(1, [report(10.0, 5), report(2.0, 1)]))  # 12 / 6 = 2
    metrics.record(*step(2, [report(8.0, 2), report(0.0, 0)]))  # 8 / 2 = 4
    metrics.record(*step(3, [report(100.0, 1)], update_applied=NOT_APPLIED))  # skipped: not averaged
    interval = metrics.collect(reset=True)
    assert [each.losses["lm loss"] for each in interval.steps] == [2.0, 4.0, 100.0]
    assert interval.losses == {"lm loss": 3.0}
    assert (interval.iterations, interval.skipped, interval.nan) == (3, 1, 0)


def test_one_value_is_averaged_over_microbatches():
    metrics = StepMetrics("cpu")
    reports = [{"sop loss": torch.tensor(value), "lm loss": torch.tensor([2 * value])} for value in (1.0, 2.0)]
    metrics.record(*step(1, reports))
    assert metrics.collect(reset=True).losses == {"sop loss": 1.5, "lm loss": 3.0}


def test_every_value_arrives_as_it_was_when_recorded():
    metrics = StepMetrics("cpu")
    lr, norm = torch.tensor(1e-3, dtype=torch.float64), torch.tensor(0.25)
    for iteration in (1, 2):
        metrics.record(
            *step(
                iteration,
                [report(1.0, 1)],
                learning_rate=lr,
                grad_norm=norm,
                loss_scale=1024.0,
                num_zeros=torch.tensor(7),
                params_norm=None,
                consumed_samples=8 * iteration,
                tokens=80 * iteration,
                global_batch_size=8,
            )
        )
        lr += 1e-3
        norm *= 2
    first, second = metrics.collect(reset=True).steps
    assert (first.learning_rate, second.learning_rate) == (1e-3, 2e-3)
    assert (first.grad_norm, second.grad_norm) == (0.25, 0.5)
    assert (second.loss_scale, second.num_zeros, second.params_norm) == (1024.0, 7, None)
    assert (second.iteration, second.consumed_samples, second.tokens, second.global_batch_size) == (2, 16, 160, 8)
    assert isinstance(second.num_zeros, int)


def test_a_line_without_reset_leaves_the_averages():
    metrics = StepMetrics("cpu")
    metrics.record(*step(1, [report(6.0, 1)]))
    first = metrics.collect(reset=False)
    assert first.losses == {"lm loss": 6.0}
    metrics.record(*step(2, [report(2.0, 1)]))
    second = metrics.collect(reset=True)
    assert [each.iteration for each in second.steps] == [2]  # every iteration comes once
    assert second.losses == {"lm loss": 4.0}
    assert second.iterations == 2
    empty = metrics.collect(reset=True)
    assert (empty.steps, empty.losses, empty.iterations) == ((), {}, 0)


def test_nothing_counted_is_zero_not_nan():
    metrics = StepMetrics("cpu")
    metrics.record(*step(1, [report(0.0, 0)]))
    interval = metrics.collect(reset=True)
    assert interval.losses == {"lm loss": 0.0}
    assert interval.nan == 0


def test_a_non_finite_loss_is_named_with_its_samples():
    metrics = StepMetrics("cpu", rank=3)
    assert not metrics.trouble_seen()
    metrics.record(*step(6, [report(1.0, 1)], sample_ids=[[0]]))
    assert not metrics.trouble_seen()
    reports, ids = [report(1.0, 1), report(math.nan, 4), report(1.0, 1)], [[40, 41], [42, 43], [44, 45]]
    recorded(metrics, 7, reports, grad_norm=torch.tensor(math.nan), sample_ids=ids)
    assert metrics.trouble_seen()
    interval = metrics.collect(reset=True)
    assert (interval.nan, interval.skipped) == (1, 1)
    assert interval.losses == {"lm loss": 1.0}
    (found,) = interval.non_finite
    assert (found.rank, found.iteration, found.microbatch, found.sample_ids) == (3, 7, 1, (42, 43))
    assert str(found) == "rank 3, iteration 7: lm loss is nan in micro-batch 1, samples [42, 43]"
    assert metrics.trouble_seen()  # until the run stops: a rank must not forget before all have agreed


def test_a_non_finite_gradient_is_named_by_the_probe():
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 1)
    probe = GradientProbe(embedding)
    for scale in (1.0, math.inf):
        (head(embedding(torch.arange(3))).sum() * scale).backward()
    metrics = StepMetrics("cpu", rank=1)
    recorded(metrics, 5, [report(1.0, 1)] * 2, gradients_finite=probe.take_tensors(), sample_ids=[[8], [9]])
    assert metrics.trouble_seen()
    (found,) = metrics.collect(reset=True).non_finite
    assert (found.what, found.microbatch, found.sample_ids) == ("gradient at the embedding", 1, (9,))
    probe.remove()
    embedding(torch.arange(3)).sum().backward()
    assert probe.take_tensors() == []


def test_a_probe_goes_by_micro_batches_whatever_the_order_of_their_backwards():
    """A pipeline has several micro-batches under way."""
    embedding = torch.nn.Embedding(10, 4)
    probe = GradientProbe(embedding)
    for _ in range(2):
        first, second, third = (embedding(torch.arange(3)).sum() * scale for scale in (1.0, 1.0, math.inf))
        for output in (third, first, second):
            output.backward()
        with torch.no_grad():
            embedding(torch.arange(3))
        assert [bool(flag) for flag in probe.take_tensors()] == [True, True, False]


def test_a_rank_that_sees_what_others_see_names_nothing():
    metrics = StepMetrics("cpu", names=False)
    recorded(metrics, 5, [report(math.nan, 1)], sample_ids=[[8]])
    assert metrics.trouble_seen() and metrics.collect(reset=True).non_finite == ()


def test_a_rank_that_computes_no_loss():
    """It knows norms and counts, and takes part in no sum of losses."""
    metrics = StepMetrics("cpu", group=_NoGroup())  # type: ignore[arg-type]
    metrics.record(*step(3, [], grad_norm=torch.tensor(2.0), update_applied=torch.tensor(True), consumed_samples=8))
    interval = metrics.collect(reset=True)
    assert interval.losses == {} and (interval.nan, interval.skipped) == (0, 0) and not metrics.trouble_seen()
    assert (interval.steps[-1].grad_norm, interval.steps[-1].consumed_samples) == (2.0, 8)


class _NoGroup:
    """What nothing can be reduced over."""


def test_a_non_finite_norm_alone_names_all_samples():
    metrics = StepMetrics("cpu")
    recorded(metrics, 5, [report(1.0, 1)] * 2, sample_ids=[[8], [9]])
    assert metrics.trouble_seen()
    (found,) = metrics.collect(reset=True).non_finite
    assert (found.what, found.microbatch, found.sample_ids) == ("gradient norm", None, (8, 9))


def test_an_overflow_that_the_loss_scale_will_mend_is_counted_only():
    metrics = StepMetrics("cpu", expect_overflow=True)
    recorded(metrics, 1, [report(1.0, 1)], gradients_finite=[NOT_APPLIED])
    assert not metrics.trouble_seen()
    interval = metrics.collect(reset=True)
    assert (interval.non_finite, interval.skipped) == ((), 1)
    metrics.record(*step(2, [report(math.inf, 1)], update_applied=NOT_APPLIED))
    assert metrics.trouble_seen()
    assert len(metrics.collect(reset=True).non_finite) == 1


class ReadsToHost(TorchDispatchMode):
    """Remembers the operators that make a host wait for a device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"):
            self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


def test_recording_reads_nothing():
    metrics = StepMetrics("cpu")
    with ReadsToHost() as reads:
        for iteration in range(1, 5):
            metrics.record(
                *step(
                    iteration,
                    [report(1.0, 1), report(2.0, 1)],
                    update_applied=torch.tensor(True),
                    grad_norm=torch.tensor(1.0),
                    gradients_finite=[torch.tensor(True)],
                    sample_ids=[[1], [2]],
                )
            )
        assert reads.seen == []
        metrics.collect(reset=True)
        assert reads.seen == []  # one copy of everything, no value by value
        torch.ones(()).item()
        assert reads.seen == ["aten::_local_scalar_dense"]


@pytest.mark.gpu
def test_nothing_synchronizes_between_two_lines():
    device = torch.device("cuda")
    metrics = StepMetrics(device)
    total = torch.tensor([6.0, 3.0], device=device)
    flag, norm = torch.tensor(True, device=device), torch.tensor(1.5, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for iteration in range(1, 4):
            metrics.record(
                *step(
                    iteration,
                    [{"lm loss": total}] * 4,
                    update_applied=flag,
                    grad_norm=norm,
                    learning_rate=norm,
                    gradients_finite=[flag] * 4,
                    sample_ids=[[0]] * 4,
                )
            )
            metrics.trouble_seen()
        interval = metrics.collect(reset=True)
        assert torch.cuda.get_sync_debug_mode() == 2
        with pytest.raises(RuntimeError):
            norm.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert interval.losses == {"lm loss": 2.0}
    metrics.record(*step(4, [{"lm loss": total * math.nan}], update_applied=flag))
    torch.cuda.synchronize()
    assert metrics.trouble_seen()


def record_two_iterations() -> tuple[float, float, int, list[str]]:
    """The losses of both iterations, the number of iterations with a NaN, and what this rank knows of it."""
    rank = dist.get_rank()
    metrics = StepMetrics("cpu", group=dist.group.WORLD, rank=rank)
    pairs = [[(10.0, 4), (2.0, 1)], [(3.0, 5), (9.0, 2)]][rank]
    metrics.record(*step(1, [{"lm loss": torch.tensor(pair)} for pair in pairs], sample_ids=[[rank], [rank + 2]]))
    bad = math.nan if rank == 1 else 1.0
    reports = [{"lm loss": torch.tensor([1.0, 1.0])}, {"lm loss": torch.tensor([bad, 1.0])}]
    metrics.record(*step(2, reports, sample_ids=[[4 + rank], [6 + rank]]))
    interval = metrics.collect(reset=True)
    first = interval.steps[0].losses["lm loss"]
    return first, interval.losses["lm loss"], interval.nan, list(map(str, interval.non_finite))


def test_two_ranks_sum_their_losses_and_each_names_its_own():
    ranks = run_on_ranks(record_two_iterations, 2)
    message = "rank 1, iteration 2: lm loss is nan in micro-batch 1, samples [7]"
    assert ranks == [(24.0 / 12.0, 2.0, 1, []), (24.0 / 12.0, 2.0, 1, [message])]
