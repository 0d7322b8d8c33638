"""The tool that computes a step again: exit codes and output."""

from pathlib import Path

import pytest
from diagnosis.test_non_finite import overflow_in_layer_1
from support.runs import train, write_documents

from tools.replay import main


def test_a_step_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_documents(tmp_path / "corpus")
    flags = f"--data-path {corpus} --eval-iters 0 --train-iters 2 --nonfinite-dump-dir {tmp_path}"
    for _ in range(2):  # a run that is started again writes the step again
        train(flags, before=overflow_in_layer_1)
    capsys.readouterr()
    assert main([str(tmp_path / "iteration_0000001")]) == 1
    lines = capsys.readouterr().out.splitlines()
    bad = [line for line in lines if line.startswith("non-finite: ")]
    assert bad[0].startswith(
        "non-finite: rank 0: output of decoder.layers.1.mlp.linear_fc2 in micro-batch 0, samples [0]"
    )
    assert "(micro-batch 0 of data parallel rank 0 of the run)" in bad[0]
    assert lines[-1].startswith("the run's first: rank 0: output of decoder.layers.1.mlp.linear_fc2")


def test_a_folder_that_is_no_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2 and "is not the whole dump of a step" in capsys.readouterr().err
