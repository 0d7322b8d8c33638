"""The loss gate on finished runs: what it finds out about their data, and its picture."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.loss_curves import draw_curve
from support.runs import write_documents

from megatron.core.exceptions import UserError
from megatron.diagnosis.gates.finished_run import open_finished_run
from megatron.diagnosis.gates.loss import LossRequest, judge_loss_of, plot_verdict
from megatron.diagnosis.gates.unigram import facts_of_blend
from megatron.diagnosis.gates.verdict import Outcome


def write_metrics(path: Path, losses: np.ndarray) -> Path:
    lines = [{"iteration": number + 1, "lm loss": float(loss)} for number, loss in enumerate(losses)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_data_of_a_run_tells_the_unigram_entropy(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data")
    facts = facts_of_blend(([prefix], None))
    assert facts.unigram is not None
    steps = np.arange(400)
    losses = facts.unigram + (math.log(1000) - facts.unigram) * np.exp(-steps / 10)
    run = open_finished_run(write_metrics(tmp_path / "metrics.jsonl", losses))
    run = replace(run, values={"data_path": [prefix], "vocab_size": 1000})
    verdict = judge_loss_of(run, LossRequest()).verdict
    assert verdict.kinds == ("shuffled labels",)
    assert verdict.figures["ln(vocabulary)"] == math.log(1000)
    # Given values win: where the entropy is lower, the same curve only stops.
    assert judge_loss_of(run, LossRequest(unigram=1.0)).verdict.kinds != ("shuffled labels",)


def test_a_loss_that_is_not_there_is_refused(tmp_path: Path) -> None:
    run = open_finished_run(write_metrics(tmp_path / "metrics.jsonl", np.ones(50)))
    with pytest.raises(UserError, match="no training step has a value of 'other'; give --loss-name"):
        judge_loss_of(run, LossRequest(name="other"))


def test_the_expected_loss_is_that_of_the_validation_if_there_is_one(tmp_path: Path) -> None:
    curve = draw_curve("good", 4).curve
    path = write_metrics(tmp_path / "metrics.jsonl", curve.losses[:200])
    reached = float(np.median(curve.losses[180:200]))
    request = LossRequest(by_step=200, expected=reached + 0.1, vocab_size=10**6, unigram=99.0)
    assert "training loss" in judge_loss_of(open_finished_run(path), request).verdict.reason
    with path.open("a") as file:
        file.write(json.dumps({"iteration": 190, "split": "validation", "lm loss": reached + 0.5}) + "\n")
    verdict = judge_loss_of(open_finished_run(path), request).verdict
    assert verdict.kinds == ("above the expected loss",) and f"{reached + 0.5:.3f}" in verdict.reason


def test_the_picture_has_the_verdict(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = draw_curve("spikes", 1).curve
    run = open_finished_run(write_metrics(tmp_path / "metrics.jsonl", curve.losses[:200]))
    judged = judge_loss_of(run, LossRequest(vocab_size=1000, unigram=5.0))
    assert judged.verdict.outcome is not Outcome.PASS
    plot_verdict(judged, tmp_path / "loss.png", "lm loss")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
