"""benchmarks/convergence.py compares the losses of three runs."""

import json
from pathlib import Path

import pytest

from benchmarks import convergence

LINE = " [date] iteration {:8d}/      40 | elapsed time per iteration (ms): 9.0 | lm loss: {:.6E} |\n"


def write_runs(folder: Path, distance: float) -> list[str]:
    """Writes runs of 40 steps: ours is `distance` from the anchor, the anchor's other seed 0.02."""
    losses = {step: 5.0 - step / 40 for step in range(1, 41)}
    rows = [{"iteration": step, "lm loss": loss + distance} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, shift in (("anchor", 0.0), ("other", 0.02)):
        (folder / f"{name}.log").write_text("".join(LINE.format(step, loss + shift) for step, loss in losses.items()))
    return [str(folder / name) for name in ("metrics.jsonl", "anchor.log", "other.log")]


@pytest.mark.parametrize(("distance", "verdict"), [(0.01, ": within the spread"), (-0.03, ": NOT within the spread")])
def test_smoothed_losses(distance: float, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "losses.png"
    command = ["compare", *write_runs(tmp_path, distance), "--window", "20", "--picture", str(picture)]
    assert convergence.main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    # The mean of 5 - step / 40 over steps 1 to 20.
    assert printed[2] == f"| 20 | {4.7375 + distance:.4f} | 4.7375 | 4.7575 | {distance:+.4f} | +0.0200 |"
    assert len(printed) == 5 and printed[-1].endswith(verdict)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_runs(tmp_path, 0.0)
    assert convergence.main(["compare", *runs]) == 2
    assert "40 steps in common, fewer than the 100 of --window" in capsys.readouterr().err
    Path(runs[1]).write_text("nothing\n")
    assert convergence.main(["compare", *runs]) == 2
    assert "no line has an iteration and its lm loss" in capsys.readouterr().err


def test_text_of_the_environment(tmp_path: Path) -> None:
    target = tmp_path / "text.jsonl"
    assert convergence.main(["text", str(target), "--bytes", "50000"]) == 0
    texts = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    assert len(texts) > 1 and 50000 <= sum(map(len, texts)) < 50000 + convergence.LONGEST_FILE
