"""What a hook gets of the run: the benchmark of docs/extending.md in a layout, logits, losses, results."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.runs import GPT, Outcome, logger_of, train

from megatron.training.hooks.hook import Hook
from megatron.training.providers import Providers

PAGE = Path(__file__).parents[3] / "docs/extending.md"
RUN = "--mock-data --train-iters 2 --fp64 --micro-batch-size 2 --eval-iters 1 --vocab-size 50"
ROWS = [(1, 2, 3, 4), (10, 20, 30), (7, 7, 7, 7, 7, 7)]


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
    """Runs the page's benchmark and a watching hook."""
    (source,) = re.findall(r"```python\n(# number_series.py\n.*?)```", PAGE.read_text(), flags=re.S)
    page: dict[str, Any] = {"__name__": "number_series"}
    exec(source, page)
    watch = Watch()
    providers = Providers(
        GPT.build_model,
        GPT.build_datasets,
        GPT.build_forward_step,
        build_hooks=lambda context: [*page["build_hooks"](context), watch],
    )
    return train(f"{RUN} {layout}", providers), watch.seen


def test_a_benchmark_of_the_page_scores_alike_under_tensor_and_pipeline_parallelism() -> None:
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
