"""Evaluation against a plain mean over all tokens, with batches whose token counts differ wildly."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks
from support.runs import TINY, train, write_documents
from torch import nn

from megatron.core.exceptions import UserError
from megatron.training.evaluate import evaluate, full_pass
from megatron.training.log.jsonl import read_metrics
from megatron.training.providers import NonLossFunctions

SEQ, MICRO, NMB = 6, 2, 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, tokens):
        return self.frozen(self.dropout(tokens))


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        losses = torch.rand(MICRO, SEQ, generator=generator)
        mask = torch.rand(MICRO, SEQ, generator=generator) < torch.rand((), generator=generator) ** 2
        yield losses, mask.float()


def forward_step(iterator, model):
    losses, mask = next(iterator)
    output = model(losses)
    assert not torch.is_grad_enabled()

    def loss_function(output):
        total, count = (output * mask).sum(), mask.sum()
        return total, count.int(), {"lm loss": torch.stack([total, count])}

    return output, loss_function


def forward_backward(*, forward_step_func, data_iterator, model, num_microbatches, forward_only, **sizes):
    """A minimal forward_backward_func for one stage."""
    assert forward_only
    assert sizes == {"seq_length": SEQ, "micro_batch_size": MICRO}
    reports = []
    for _ in range(num_microbatches):
        output, loss_function = forward_step_func(data_iterator, model[0])
        reports.append(loss_function(output)[2])
    return reports


def run(iterator, model, num_iterations, *, of=forward_backward, **arguments):
    return evaluate(
        of,
        forward_step,
        iterator,
        [model],
        num_iterations=num_iterations,
        **{"num_microbatches": NMB, "micro_batch_size": MICRO, "seq_length": SEQ} | arguments,
    )


def expected(pairs):
    pairs = list(pairs)
    total = sum((losses.double() * mask.double()).sum().item() for losses, mask in pairs)
    return total, sum(mask.sum().item() for _, mask in pairs)


def test_mean_over_every_token():
    total, count = expected(batches(4 * NMB))
    means = [(losses * mask).sum() / mask.sum().clamp(min=1) for losses, mask in batches(4 * NMB)]
    result = run(batches(4 * NMB), Model(), 4, data_parallel_size=5)
    assert result.losses["lm loss"] == pytest.approx(total / count, rel=1e-6)
    assert abs(result.losses["lm loss"] - sum(means).item() / len(means)) > 1e-2  # a mean of means is another number
    assert result.tokens == count
    assert result.counts == {"lm loss": count}
    assert (result.samples, result.iterations, result.interrupted) == (4 * NMB * MICRO * 5, 4, False)


def test_data_that_are_no_losses_come_from_the_next_batches_of_a_plain_iterator():
    def collecting(*, collect_non_loss_data=False, **arguments):
        reports = forward_backward(**arguments)
        return [report["lm loss"] for report in reports] if collect_non_loss_data else reports

    found = run(batches(2 * NMB), Model(), 1, of=collecting, non_loss=NonLossFunctions())
    pairs = list(batches(2 * NMB))[NMB:]
    assert [float(data[1]) for data in found.non_loss_data] == [mask.sum().item() for _, mask in pairs]


def test_sums_are_float64():
    def one_large_many_small(*, num_microbatches, **_):
        return [{"lm loss": torch.tensor([2.0**24 if i == 0 else 1.0, 1.0])} for i in range(num_microbatches)]

    result = run(None, Model(), 1, of=one_large_many_small, num_microbatches=1001)
    assert result.losses["lm loss"] == (2.0**24 + 1000) / 1001


def test_dropout_is_off_within_and_modes_come_back():
    model = Model()
    with torch.enable_grad():
        run(batches(NMB), model, 1)
        assert torch.is_grad_enabled()
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)


def test_modes_come_back_after_an_error():
    model = Model()
    with pytest.raises(UserError, match="ended in iteration 3 of 4; lower --eval-iters to 2"):
        run(batches(2 * NMB), model, 4)
    assert model.dropout.training


def test_one_value_reports_are_averaged():
    def reports(*, num_microbatches, **_):
        return [{"sop loss": torch.tensor(float(i))} for i in range(num_microbatches)]

    result = run(None, Model(), 2, of=reports, num_microbatches=3)
    assert result.losses == {"sop loss": 1.0}
    assert result.counts == {"sop loss": 6.0}


def test_a_stage_without_loss_has_none():
    result = run(None, Model(), 2, of=lambda **_: [])
    assert (result.losses, result.tokens) == ({}, None)


def test_all_masked_is_zero_of_no_tokens():
    def masked(**_):
        return [{"lm loss": torch.tensor([0.0, 0.0])}]

    result = run(None, Model(), 1, of=masked)
    assert (result.losses, result.tokens) == ({"lm loss": 0.0}, 0)


def test_stopping_early_is_said():
    asked = []

    def should_stop():
        asked.append(None)
        return len(asked) == 2

    result = run(batches(10 * NMB), Model(), 10, should_stop=should_stop)
    total, count = expected(batches(2 * NMB))
    assert (result.iterations, result.interrupted, result.tokens) == (2, True, count)
    assert result.losses["lm loss"] == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("number", [0, -1])
def test_nothing_to_evaluate_is_an_error(number):
    with pytest.raises(UserError, match=f"--eval-iters {number}: an evaluation needs at least one iteration"):
        run(batches(1), Model(), number)


def test_full_pass():
    assert (full_pass(16, 8), full_pass(17, 8)) == (2, 3)
    with pytest.raises(UserError, match="--full-validation"):
        full_pass(0, 8)


def evaluate_own_batches() -> tuple[float, int, int]:
    rank = dist.get_rank()
    result = run(batches(2 * NMB, seed=rank), Model(), 2, group=dist.group.WORLD, data_parallel_size=2)
    return result.losses["lm loss"], result.tokens, result.samples


def test_two_ranks_with_different_token_counts():
    outputs = run_on_ranks(evaluate_own_batches, 2)
    assert outputs[0] == outputs[1]
    total, count = expected([*batches(2 * NMB, seed=0), *batches(2 * NMB, seed=1)])
    loss, tokens, samples = outputs[0]
    assert loss == pytest.approx(total / count, rel=1e-6)
    assert (tokens, samples) == (count, 2 * 2 * NMB * MICRO)


def test_each_validation_set_has_its_own_loss(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wiki, code = (write_documents(tmp_path / name, seed=seed) for seed, name in enumerate(("wiki", "code")))
    flags = f"--train-data-path {wiki} --train-iters 2 --eval-interval 1 --valid-data-path"
    base = TINY.replace("--split 80,10,10 --eval-iters 0", "--eval-iters 1")

    def losses(of: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for record in train(f"{flags} {of}", base=base).validations:
            found.setdefault(record.split, []).append(record.losses["lm loss"])
        return found

    both = losses(f"{wiki} {code} --multiple-validation-sets --validation-set-names wiki code")
    assert " validation loss at iteration 2 on validation-code | lm loss value: " in capfd.readouterr().out
    alone = {name: losses(path)["validation"] for name, path in (("wiki", wiki), ("code", code))}
    assert both == {f"validation-{name}": found for name, found in alone.items()}
    assert alone["wiki"] != alone["code"] and len(alone["wiki"]) == 2  # after each step
    whole = losses(f"{wiki} {code} --multiple-validation-sets --full-validation --train-iters 1")
    assert len(whole["validation-0"]) == 1 and whole["validation-1"] != whole["validation-0"]


FROZEN = "--lr 0 --min-lr 0 --weight-decay 0 --train-iters 3 --eval-interval 1 --fp64"
EVALUATING = TINY.replace("--eval-iters 0", "--eval-iters 2")


def frozen_losses(flags: str, split: str = "validation") -> list[float]:
    """The losses of each evaluation of a run that does not change its weights."""
    found = [record for record in train(f"{FROZEN} {flags}", base=EVALUATING).validations if record.split == split]
    assert [record.iteration for record in found] == list(range(4 - len(found), 4))  # once a step, the last one too
    return [record.losses["lm loss"] for record in found]


@pytest.mark.parametrize("workers", [0, 1])
def test_all_evaluations_read_the_same_samples(tmp_path: Path, workers: int) -> None:
    data = f"--data-path {write_documents(tmp_path / 'a', documents=600)} --num-workers {workers}"
    losses = frozen_losses(data)
    assert len(losses) == 3 and len(set(losses)) == 1


def test_a_resumed_run_evaluates_the_same_samples(tmp_path: Path) -> None:
    data = f"--data-path {write_documents(tmp_path / 'a', documents=600)}"
    run = f"{FROZEN} {data} --save {tmp_path / 'run'} --load {tmp_path / 'run'} --save-interval 2"
    first = train(f"{run} --exit-interval 2", base=EVALUATING).validations
    rest = train(run, base=EVALUATING).validations
    again = train(run, base=EVALUATING).validations  # nothing is left to train
    records = [record for record in (*first, *rest, *again) if record.split == "validation"]
    losses = [(record.iteration, record.losses["lm loss"]) for record in records]
    assert losses == [(number, losses[0][1]) for number in (1, 2, 3, 3)]
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl").validation if line["split"] == "validation"]
    assert [line["iteration"] for line in lines] == [1, 2, 3]


def test_fresh_samples_are_megatron_lms_way(tmp_path: Path) -> None:
    data = f"--data-path {write_documents(tmp_path / 'a', documents=600)}"
    losses = frozen_losses(f"{data} --eval-fresh-samples")
    assert len(set(losses)) == 3


def frozen_losses_of_rank(flags: str) -> list[float]:
    return frozen_losses(flags)


def test_every_layout_evaluates_the_same_samples(tmp_path: Path) -> None:
    """A batch ramp-up changes nothing: evaluations have the last size."""
    data = f"--data-path {write_documents(tmp_path / 'a', documents=600)}"
    alone = frozen_losses(data)
    for rank in run_on_ranks(frozen_losses_of_rank, 2, f"{data} --rampup-batch-size 2 2 4"):
        assert rank == [] or (rank == pytest.approx(alone, rel=1e-13) and len(set(rank)) == 1)
