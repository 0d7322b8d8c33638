"""What a gate finds in the folder of a finished run."""

from pathlib import Path

import pytest
from support.runs import train_on_ranks, write_documents

from megatron.core.exceptions import UserError
from megatron.diagnosis.gates.finished_run import open_finished_run


def test_a_run_with_checkpoints_tells_flags_and_ranks(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data")
    flags = f"--data-path {prefix} --train-iters 2 --save {tmp_path / 'run'} --tensor-model-parallel-size 2"
    train_on_ranks(flags, 2)
    run = open_finished_run(tmp_path / "run")
    assert run.ranks == 2 and run.values["data_path"] == [prefix] and run.values["vocab_size"] == 40
    assert [line["iteration"] for line in run.metrics.training] == [1, 2]


def test_metrics_alone_are_enough(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "lm loss": 2.0}\n')
    run = open_finished_run(tmp_path / "metrics.jsonl")
    assert run.ranks is None and not run.values and len(run.metrics.training) == 1


def test_folders_without_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no metrics"):
        open_finished_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has no training steps"):
        open_finished_run(tmp_path)
