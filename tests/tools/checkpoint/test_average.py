"""tools/checkpoint/average.py: uniform, moving and greedy averages of a run's checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from support.runs import state_at_start, train
from torch import Tensor

from tools.checkpoint import average as tool

RUN = "--mock-data --fp64 --save-interval 2"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    train(f"{RUN} --train-iters 6 --save {root}")
    return root


def weights(root: Path, more: str) -> dict[str, Tensor]:
    state = state_at_start([train(f"{RUN} --train-iters 6 {more} {root} --skip-train --eval-iters 1")])
    return {name: value for name, value in state.items() if name.startswith("weight ")}


def run(root: Path, *words: str) -> int:
    return tool.main(["--load", str(root), *words])


def test_a_greedy_average_is_at_least_as_good_as_each_checkpoint(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "1 4 7 10 13 16"}\n{"text": "2 3 4 5 6 7 8 9"}\n')
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([{"task": "t", "output_type": "loglikelihood_rolling", "data": "texts.jsonl"}]))
    scored = ["--eval-tasks", str(tasks), "--metric", "t/perplexity"]
    assert run(checkpoints, "--last", "3", "--method", "greedy", *scored, "--save", str(tmp_path / "soup")) == 0
    printed, titles = capsys.readouterr()
    assert titles.startswith("average of the iterations 2\naverage of the iterations 4\n")
    config = tool.AverageConfig(eval_tasks=str(tasks), metric="t/perplexity")
    best = tool.score_of(tmp_path / "soup", config)
    each = [float(line.split("perplexity: ")[1].split(" ")[0]) for line in printed.splitlines() if "task t" in line][:3]
    assert -best <= min(each) * (1 + 1e-5)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("average-")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--last", "4"), "--last 4: {root} holds 3 checkpoints"),
        (("--iterations", "2", "3"), "iteration 3"),
        (("--last", "2", "--method", "greedy"), "--method greedy needs --eval-tasks FILE and --metric TASK/METRIC"),
        (("--last", "2", "--iterations", "2", "4"), "give one of --iterations and --last"),
        (("--last", "2", "--save", "{root}/no/where"), "--save {root}/no/where: the folder {root}/no does not exist"),
        (("--last", "2", "--save", __file__), f"--save {__file__} is no empty folder"),
    ],
)
def test_what_cannot_be_averaged_is_one_sentence(
    checkpoints: Path, tmp_path: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tuple(word.format(root=checkpoints) for word in words)
    assert run(checkpoints, "--save", str(tmp_path / "none"), *words) == 2
    printed = capsys.readouterr().err
    assert message.format(root=checkpoints) in printed and printed.count("\n") == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        (("--last", "2"), (0.0, 0.5, 0.5)),
        (("--iterations", "2", "6", "4", "--method", "ema", "--decay", "0.75"), (0.5625, 0.1875, 0.25)),
    ],
)
def test_an_average_is_the_sum_of_its_shares(
    checkpoints: Path, tmp_path: Path, words: tuple[str, ...], shares: tuple[float, ...]
) -> None:
    assert run(checkpoints, *words, "--save", str(tmp_path / "mean")) == 0
    parts = [weights(checkpoints, f"--ckpt-step {step} --load") for step in (2, 4, 6)]
    found = weights(tmp_path / "mean", "--pretrained-checkpoint")
    assert found.keys() == parts[0].keys()
    for name, value in found.items():
        expected = sum(share * part[name] for share, part in zip(shares, parts, strict=True))
        torch.testing.assert_close(value, expected, rtol=1e-14, atol=1e-16)
