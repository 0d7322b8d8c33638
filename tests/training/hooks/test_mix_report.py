"""--data-stages in a run: the mix in the log, and a run that is resumed in the middle of a stage."""

import json
import re
from pathlib import Path

import pytest
from support.runs import train, write_documents

from megatron.core.exceptions import UserError
from megatron.training.trainer import Trainer


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    a, b = (write_documents(tmp_path / name, documents=100, seed=seed) for seed, name in enumerate("ab"))
    content = [{"from_sample": 0, "data_path": f"3 {a} 1 {b}"}, {"from_sample": 8, "data_path": [b]}]
    (tmp_path / "stages.json").write_text(json.dumps(content))
    return tmp_path / "stages.json"


@pytest.mark.slow
def test_the_mix_is_in_the_log_and_runs_resume(
    stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--data-stages {stages} --eval-iters 0 --log-interval 2"
    whole = train(f"{flags} --train-iters 5")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data: ")]
    assert re.fullmatch(
        r"data: whole run: a a: 6 samples, 0\.\d\d passes; b b: 14 samples, 0\.\d\d passes", lines.pop(2)
    )
    assert lines == [
        "data: stage 1 from sample    0:    8 samples |aaaaaaaaaaaaaaaaaaaaaaaaaaaaaabbbbbbbbbb| a 75.00%, b 25.00%",
        "data: stage 2 from sample    8:   12 samples |bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb| b 100.00%",
        "data: stage 1 of 2 from sample 0 | of the stage: a 75.00%, b 25.00% | of the run: a 75.00%, b 25.00%",
        "data: stage 1 of 2 from sample 0 | of the stage: a 75.00%, b 25.00% | of the run: a 75.00%, b 25.00%",
        "data: stage 2 of 2 from sample 8 | of the stage: b 100.00% | of the run: a 50.00%, b 50.00%",
        "data: stage 2 of 2 from sample 8 | of the stage: b 100.00% | of the run: a 37.50%, b 62.50%",
    ]
    save = f"--save {tmp_path / 'run'} --load {tmp_path / 'run'} --save-interval 3"
    train(f"{flags} {save} --train-iters 5 --exit-interval 3")
    assert "data: planned / achieved mix at iteration 3: a 50.00% / 50.00%, b" in capsys.readouterr().out
    rest = train(f"{flags} {save} --train-iters 5")
    assert rest.losses == whole.losses[3:]


def shares_of(run: Path) -> list[dict[str, float]]:
    """The mix at each log line in the metrics of a run."""
    kind = "share of samples on source "
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [{key.removeprefix(kind): line[key] for key in line if key.startswith(kind)} for line in lines]
    return [shares for shares in found if shares]


def test_weights_that_change_at_a_resume_count_from_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (write_documents(tmp_path / name, documents=100, seed=seed) for seed, name in enumerate("abc"))
    run = tmp_path / "run"
    flags = f"--split 1 --log-interval 1 --save {run} --load {run} --override-opt-param-scheduler"
    train(f"{flags} --data-path 50 {a} 50 {b} --train-iters 2")
    train(f"{flags} --data-path 100 {b} --train-iters 4")
    assert shares_of(run)[-1] == {"a": 0.25, "b": 0.75}
    assert "; to change weights in the course of a run" in capsys.readouterr().out
    train(f"{flags} --data-path 50 {b} 50 {c} --train-iters 8")
    assert shares_of(run)[-1] == {"a": 4 / 32, "b": 20 / 32, "c": 8 / 32}
    assert "data: of the run: a 12.50%, b 62.50%, c 25.00%" in capsys.readouterr().out


@pytest.mark.parametrize(("weights", "shares"), [((50, 50), (0.5, 0.5)), ((25, 75), (0.25, 0.75))])
def test_a_checkpoint_without_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: tuple[int, int], shares: tuple[float, float]
) -> None:
    """The counts are computed if the weights are those of the checkpoint; otherwise a sentence says what is missing."""
    a, b = (write_documents(tmp_path / name, documents=100, seed=seed) for seed, name in enumerate("ab"))
    run = tmp_path / "run"
    flags = f"--split 1 --log-interval 1 --save {run} --load {run} --override-opt-param-scheduler"

    def forget(trainer: Trainer) -> None:
        trainer.checkpoints.mix = None

    train(f"{flags} --data-path 50 {a} 50 {b} --train-iters 4 --exit-interval 2", before=forget)
    train(f"{flags} --data-path {weights[0]} {a} {weights[1]} {b} --train-iters 4")
    assert tuple(shares_of(run)[-1].values()) == shares
    left_out = "leaves out 8 of the 8 samples before this run: the checkpoint does not say"
    assert (left_out in capsys.readouterr().out) == (weights != (50, 50))


def test_what_does_not_go_together(stages: Path) -> None:
    with pytest.raises(UserError, match=r"--data-stages gives the order of samples, which --dataloader-type cyclic"):
        train(f"--data-stages {stages} --dataloader-type cyclic --train-iters 1")
    with pytest.raises(UserError, match=r"--data-path and --data-stages say in 2 ways"):
        train(f"--data-stages {stages} --data-path x --train-iters 1")
