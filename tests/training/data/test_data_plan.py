"""The plan of a run's data: samples, tokens and epochs of each data set."""

import json
import re
from pathlib import Path

import pytest
from support.runs import train, write_documents

from megatron.training.data.data_plan import data_plan


def test_each_data_set_of_each_split_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (write_documents(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    flags = "--train-iters 2 --eval-iters 1 --eval-interval 1"
    train(f"{flags} --data-path 30 {first} 70 {second}")
    lines = [line for line in capsys.readouterr().out.splitlines() if " data: " in line and "samples of" in line]
    assert [line.partition(",")[0] for line in lines] == [
        f"training data: 2 samples of {first}",
        f"training data: 6 samples of {second}",
        f"validation data: 1 samples of {first}",
        f"validation data: 3 samples of {second}",
        f"test data: 1 samples of {first}",
        f"test data: 3 samples of {second}",
    ]
    tokens = int(lines[0].rpartition(" ")[2].replace(",", ""))
    assert lines[0].endswith(f", 32 tokens, {32 / tokens:.3g} epochs of its {tokens:,}") and tokens > 1000
    stages = tmp_path / "stages.json"
    content = [{"from_sample": 0, "data_path": [first]}, {"from_sample": 4, "data_path": ["50", first, "50", second]}]
    stages.write_text(json.dumps(content))
    train(f"{flags} --data-stages {stages}")
    printed = capsys.readouterr().out
    assert f"training data: 6 samples of {first}," in printed and f"training data: 2 samples of {second}," in printed
    train(f"{flags} --data-path {first} --full-validation")
    printed = capsys.readouterr().out
    assert f"training data: 8 samples of {first}," in printed
    assert re.search(r"validation data: .*, (1|0\.9\d*) epochs of", printed)


def test_made_up_data_and_that_of_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    train("--mock-data --train-iters 1 --eval-iters 0")
    assert "training data: 4 samples of made-up data\n" in capsys.readouterr().out
    assert list(data_plan((iter([1]), None, [object()]), (4, None, None), 16)) == []
