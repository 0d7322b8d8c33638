"""Losses and tokens of the single data sets of a blend."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_lines import SMALL, configured, without
from support.runs import logger_of, train, train_on_ranks, write_documents

from megatron.training.data.batch import Batch
from megatron.training.data.source_losses import MOST_SOURCES, source_names, with_source_losses
from megatron.training.log.jsonl import read_metrics


def batch_of(sources: list[list[int]], mask: list[list[float]]) -> Batch:
    rows = torch.zeros(len(sources), len(sources[0]), dtype=torch.int64)
    return Batch(rows, rows, torch.tensor(mask), rows, sources=torch.tensor(sources, dtype=torch.int32))


def loss_func(losses: torch.Tensor) -> Any:
    return losses.sum(), losses.numel(), {"lm loss": torch.tensor([losses.sum(), losses.numel()])}


def test_sums_and_tokens_by_source() -> None:
    batch = batch_of([[0, 0], [2, 2]], [[1.0, 0.0], [1.0, 1.0]])
    losses = torch.tensor([[3.0, 50.0], [1.0, 4.0]])
    loss, count, report = with_source_losses(loss_func, batch, ("a", "b", "c"))(losses)
    assert (float(loss), count) == (58.0, 4) and [*report] == ["lm loss", *(f"lm loss on source {n}" for n in "abc")]
    assert [report[f"lm loss on source {name}"].tolist() for name in "abc"] == [[3.0, 1.0], [0.0, 0.0], [5.0, 2.0]]
    losses[1, 0] = math.nan
    report = with_source_losses(loss_func, batch, ("a", "b", "c"))(losses)[-1]
    assert report["lm loss on source a"].tolist() == [3.0, 1.0] and report["lm loss on source c"][0].isnan()


def test_without_a_blend_the_loss_function_is_as_it_was() -> None:
    batch = batch_of([[0]], [[1.0]])
    assert with_source_losses(loss_func, batch, ()) is loss_func
    assert with_source_losses(loss_func, batch, tuple(map(str, range(MOST_SOURCES + 1)))) is loss_func


def test_names_of_sources(tmp_path: Path) -> None:
    for name in ("x/a", "x/b", "y/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_documents(tmp_path / name, documents=3)

    def names(*prefixes: str) -> tuple[str, ...]:
        words = " ".join(f"1 {tmp_path / prefix}" for prefix in prefixes)
        return source_names(configured(f"--data-path {words}", base=without("--mock-data")))

    assert names("x/a", "x/b") == ("a", "b")
    assert names("x/a", "y/a") == (str(tmp_path / "x/a"), str(tmp_path / "y/a"))
    assert names("x/a", "x/b", "x/a") == ("a", "b", "a (2)")  # a prefix may be given again, for more weight
    train(f"--data-path {tmp_path / 'x/a'} {tmp_path / 'x/a'} --split 1,0,0 --train-iters 1 --eval-iters 0")
    assert names("x/a") == () == source_names(configured("", base=SMALL))


@pytest.fixture
def blend(tmp_path: Path) -> str:
    a, b, c = (write_documents(tmp_path / name, documents=100, seed=seed) for seed, name in enumerate("abc"))
    sources = f"--data-path 0 {c} 3 {a} 1 {b}"
    return f"{sources} --train-iters 6 --log-interval 3 --eval-interval 3 --eval-iters 1 --save-interval 3"


def test_metrics_of_a_run_and_of_one_that_is_resumed(
    blend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"{blend} --save {tmp_path / 'run'} --load {tmp_path / 'run'} --exit-interval 3")
    train(f"{blend} --save {tmp_path / 'run'} --load {tmp_path / 'run'}")
    lines = read_metrics(tmp_path / "run/metrics.jsonl").training
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]  # each step once
    keys = [f"lm loss on source {name}" for name in ("a", "b")]
    for line in lines:
        found = [(line[f"tokens on source {name}"], line[f"lm loss on source {name}"]) for name in ("a", "b")]
        assert [count for count, _ in found] == [48, 16]  # 3 and 1 samples of 16 tokens
        assert sum(count * loss for count, loss in found) / 64 == pytest.approx(line["lm loss"], rel=1e-6)
    assert lines[2]["share of samples on source a"] == lines[5]["share of samples on source a"] == 0.75
    assert "share of samples on source a" not in lines[1]
    printed = capsys.readouterr().out
    assert printed.count("data: of the run: a 75.00%, b 25.00%") == 2 and keys[0] not in printed


@pytest.mark.slow
def test_every_layout_has_them(blend: str) -> None:
    flags = f"{blend} --fp64 --hidden-dropout 0 --attention-dropout 0 --reset-attention-mask"
    alone = train(flags).steps
    ranks = logger_of(train_on_ranks(f"{flags} --context-parallel-size 2", 2)).steps
    for one, other in zip(alone, ranks, strict=True):
        assert one.by_source.keys() == other.by_source.keys() == {f"lm loss on source {name}" for name in "ab"}
        for name, (loss, count) in one.by_source.items():
            assert other.by_source[name] == (pytest.approx(loss, rel=1e-9), count)
