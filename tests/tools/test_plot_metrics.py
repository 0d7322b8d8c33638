"""tools/plot_metrics.py as a command."""

import subprocess
from pathlib import Path

import pytest
from support.programs import python

ROOT = Path(__file__).parents[2]


def run(*arguments):
    return subprocess.run(
        [python(), "tools/plot_metrics.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.slow
def test_draws_beside_the_metrics(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "lm loss": 2.0}\n{"iteration": 2, "lm loss": 1.0}\n')
    result = run(tmp_path / "metrics.jsonl")
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_compares_runs(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"iteration": 1, "lm loss": 2.0, "tokens per second": 5.0}\n')
    given = [tmp_path / "a", tmp_path / "b", "--panels", "throughput", "--smooth", "3"]
    result = run(*given, "--output", tmp_path / "both.png")
    assert (result.returncode, result.stdout) == (0, f"{tmp_path}/both.png\n")
    assert run(*given[:2], "--smooth", "0").stderr == "error: --smooth 0: give at least 1 iteration\n"


def test_a_missing_file_is_an_error_of_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    result = run(tmp_path / "none.jsonl")
    assert result.returncode == 2
    assert result.stderr == f"error: {tmp_path}/none.jsonl: cannot read the metrics: No such file or directory\n"
