"""tools/show_pipeline.py: pictures of the lists that training executes."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.show_pipeline import main

SMALL = ["--pipeline-model-parallel-size", "3", "--num-microbatches", "4"]


def test_a_picture_for_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b: 3 ranks, 4 micro-batches",
        "length 18, bubble 33.3% of all ranks' time",
        "peak activations by rank, in micro-batches through all chunks of a rank: 3 2 1",
        "0 |F0 F1 F2             B0=== F3 B1===    B2===    B3===",
        "1 |   F0 F1       B0=== F2 B1=== F3 B2===    B3===",
        "2 |      F0 B0=== F1 B1=== F2 B2=== F3 B3===",
    ]


def test_times_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    times = ["--forward-time", "2", "--input-gradient-time", "3", "--weight-gradient-time", "1", "--message-time", "1"]
    assert main([*SMALL, *times, "--pipeline-schedule", "zb-h1"]) == 0
    shown = capsys.readouterr().out
    length = float(re.search(r"length (\S+),", shown)[1])  # type: ignore[index]
    assert length > 4 * (2 + 3 + 1) + 2 * (1 + 1)  # there is work, and two messages each way


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ([], {"forward", "backward"}),
        (["--pipeline-schedule", "zb-h1"], {"forward", "input gradient", "weight gradient"}),
        (
            ["--pipeline-schedule", "zb-v"],
            {f"{kind}, chunk {c}" for kind in ("forward", "input gradient", "weight gradient") for c in (0, 1)},
        ),
        (["--num-virtual-stages-per-pipeline-rank", "2", "--forward-only"], {"forward, chunk 0", "forward, chunk 1"}),
    ],
)
def test_a_picture_as_svg(
    flags: list[str], kinds: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.svg"
    assert main([*SMALL, *flags, "--output", str(picture)]) == 0
    assert str(picture) in capsys.readouterr().out
    root = ElementTree.fromstring(picture.read_text())
    name = "{http://www.w3.org/2000/svg}"
    texts = {element.text for element in root.iter(f"{name}text")}
    assert kinds <= texts and {"rank 0", "rank 1", "rank 2"} <= texts
    boxes = [e for e in root.iter(f"{name}rect") if e.find(f"{name}title") is not None]
    assert len(boxes) == 3 * 4 * len(kinds)
    for box in boxes:
        left, width = float(box.attrib["x"]), float(box.attrib["width"])
        assert 0 <= left <= left + width <= 1200


def test_lists_of_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL[:3], "1", "--actions"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "0: F0 >F0 <B0 S0 B0",
        "1: <F0 F0 >F0 <B0 S0 B0 >B0",
        "2: <F0 F0 S0 B0 >B0",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pipeline-schedule", "interleaved"], "needs --num-virtual-stages-per-pipeline-rank of 2 or more"),
        (["--pipeline-schedule", "zb-v", "--num-virtual-stages-per-pipeline-rank", "3"], "zb-v has 2 chunks"),
        (["--pipeline-schedule", "1f1b", "--num-virtual-stages-per-pipeline-rank", "2"], "use interleaved"),
        (["--num-microbatches", "0"], "--num-microbatches 0 must be at least 1"),
        (["--num-microbatches", "100000000000"], "--num-microbatches 100000000000 is too much for a picture"),
        (
            ["--num-virtual-stages-per-pipeline-rank", "2", "--microbatch-group-size-per-virtual-pipeline-stage", "2"],
            "less than the 3 ranks; 3 works",
        ),
    ],
)
def test_what_does_not_fit_is_said(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --output {tmp_path} cannot be written: Is a directory\n"
