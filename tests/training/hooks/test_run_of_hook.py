"""What a hook gets of the run: a benchmark of its own in a layout, logits, losses, results."""

from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.runs import GPT, Outcome, logger_of, train

from megatron.training.hooks.hook import Hook
from megatron.training.log.records import TaskRecord
from megatron.training.providers import Providers

RUN = "--mock-data --train-iters 2 --fp64 --micro-batch-size 2 --eval-iters 1 --vocab-size 50"
ROWS = [(1, 2, 3, 4), (10, 20, 30), (7, 7, 7, 7, 7, 7)]


class NumberSeries(Hook):
    """Scores which number the model puts next."""

    def after_step(self, iteration: int) -> None:
        if iteration % 2:
            return
        series = {(1, 2, 3, 4): 5, (10, 20, 30): 40, (7, 7, 7, 7, 7): 7}
        logits = self.run.full_logits([*series])
        likely = [int(logits[number, len(row) - 1].argmax()) for number, row in enumerate(series)]
        share = sum(map(int.__eq__, likely, series.values())) / len(series)
        scores = {"acc": (share, None), "largest logit": (float(logits[:, 0].max()), None)}
        self.run.log.task(TaskRecord(iteration, "number series", scores, len(series)))


class Watch(Hook):
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def after_step(self, iteration: int) -> None:
        self.seen["logits"] = self.run.full_logits(ROWS)
        self.seen["ids"] = self.run.last_step.sample_ids
        self.seen["reports"] = [report["lm loss"].tolist() for report in self.run.last_step.reports]

    def after_evaluate(self, iteration: int) -> None:
        self.seen.setdefault("evaluations", []).append(dict(self.run.evaluations))


def watched(layout: str) -> tuple[Outcome, dict[str, Any]]:
    """Runs the benchmark and a watching hook."""
    watch = Watch()
    providers = Providers(
        GPT.build_model,
        GPT.build_datasets,
        GPT.build_forward_step,
        build_hooks=lambda context: [NumberSeries(), watch],
    )
    return train(f"{RUN} {layout}", providers), watch.seen


def test_a_benchmark_of_a_hook_scores_alike_under_tensor_and_pipeline_parallelism() -> None:
    one, alone = watched("")
    ranks = run_on_ranks(watched, 4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    (expected,) = one.tasks
    (found,) = logger_of([outcome for outcome, _ in ranks]).tasks
    assert (found.iteration, found.task) == (2, "number series")
    assert [*found.scores] == [*expected.scores] == ["acc", "largest logit"]
    for name, (value, _) in expected.scores.items():
        assert found.scores[name][0] == pytest.approx(value, rel=1e-10)
    assert alone["logits"].shape == (3, 6, 51)
    for _, seen in ranks:
        for number, row in enumerate(ROWS):
            own = slice(0, len(row))
            torch.testing.assert_close(seen["logits"][number, own], alone["logits"][number, own], rtol=1e-9, atol=1e-11)
        assert seen["ids"] == alone["ids"]
    for outcome, seen in ranks:
        has_loss = outcome.place["pp"] == 1
        assert bool(seen["reports"]) == has_loss
        for results, those_alone in zip(seen["evaluations"], alone["evaluations"], strict=True):
            assert ([*results] == [*those_alone]) if has_loss else not results
    assert [[*results] for results in alone["evaluations"]] == [["validation"], ["test"]]
