"""benchmarks/convergence.py compares the losses of runs."""

import json
from pathlib import Path

import pytest

from benchmarks import convergence

LINE = " [date] iteration {:8d}/      40 | elapsed time per iteration (ms): 9.0 | lm loss: {:.6E} |\n"


def write_runs(folder: Path, distance: float) -> list[str]:
    """Writes runs of 40 steps: ours is `distance` from the anchor, the anchor's other seed 0.02. The second run of ours
    ends after 30 steps."""
    losses = {step: 5.0 - step / 40 for step in range(1, 41)}
    rows = [{"iteration": step, "lm loss": loss + distance} for step, loss in losses.items()]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "ours.jsonl").write_text("".join(lines))
    (folder / "ours-plain.jsonl").write_text("".join(lines[:30]))
    for name, shift in (("anchor", 0.0), ("other-seed", 0.02)):
        (folder / f"{name}.log").write_text("".join(LINE.format(step, loss + shift) for step, loss in losses.items()))
    files = "anchor.log", "ours.jsonl", "ours-plain.jsonl", "other-seed.log"
    return [f"{Path(name).stem}={folder / name}" for name in files]


@pytest.mark.slow_cases("0.01-within the spread")
@pytest.mark.parametrize(("distance", "verdict"), [(0.01, "within the spread"), (-0.03, "NOT within the spread")])
def test_smoothed_losses(distance: float, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "losses.png"
    command = ["compare", *write_runs(tmp_path, distance), "--window", "20", "--picture", str(picture)]
    assert convergence.main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    # The mean of 5 - step / 40 over steps 1 to 20, and over steps 21 to 40, which ours-plain has not reached.
    assert printed[2:4] == [
        f"| 20 | 4.7375 | {distance:+.4f} | {distance:+.4f} | +0.0200 |",
        f"| 40 | 4.2375 | {distance:+.4f} | | +0.0200 |",
    ]
    size = abs(distance)
    assert printed[7:10] == [
        f"| ours | 40 | {size:.5f} | {size:.4f} | {distance:+.4f} |",
        f"| ours-plain | 30 | {size:.5f} | {size:.4f} | {distance:+.4f} |",
        "| other-seed | 40 | 0.02000 | 0.0200 | +0.0200 |",
    ]
    assert printed[11:] == [f"{name}: {verdict} of other-seed" for name in ("ours", "ours-plain")]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_drift_shows_in_the_last_quarter() -> None:
    anchor = dict.fromkeys(range(1, 81), 5.0)
    run = {step: loss + (0.0 if step <= 60 else 0.1) for step, loss in anchor.items()}
    found = convergence.distance(run, anchor, 10)
    assert (found.at_start, found.mean, found.at_end) == pytest.approx((0.0, 0.025, 0.1))


def test_runs_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_runs(tmp_path, 0.0)
    command = ["compare", *runs, "--window", "35"]
    assert convergence.main(command) == 0
    assert "ours-plain is left out: it has 30 steps in common with anchor, not one" in capsys.readouterr().out
    (tmp_path / "ours.jsonl").unlink()
    assert convergence.main(command) == 0
    assert "ours is left out: " in capsys.readouterr().out
    assert convergence.main(["compare", *runs]) == 2
    assert "40 steps in common with anchor, not one whole window of 100" in capsys.readouterr().err
    (tmp_path / "anchor.log").write_text("nothing\n")
    assert convergence.main(["compare", *runs]) == 2
    assert "the reference anchor has no losses: " in capsys.readouterr().err
    assert convergence.main(["compare", "anchor.log"]) == 2
    assert "write NAME=FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_text_of_the_environment(tmp_path: Path) -> None:
    target = tmp_path / "text.jsonl"
    assert convergence.main(["text", str(target), "--bytes", "50000"]) == 0
    texts = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    assert len(texts) > 1 and 50000 <= sum(map(len, texts)) < 50000 + convergence.LONGEST_FILE
