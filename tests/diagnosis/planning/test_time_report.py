"""What --dry-run --gpu prints."""

import re
from pathlib import Path

import pytest
from support.command_lines import SMALL

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.time_report import time_lines
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment

FLAGS = f"{SMALL} --bf16 --dry-run --gpu h100"


def report(flags: str = "", ranks: int = 16, node: int | None = 8) -> list[str]:
    launch = LaunchEnvironment(ranks, True, ranks_of_host=node)
    config = configure(f"{FLAGS} --global-batch-size 64 {flags}".split(), launch_environment=launch)
    return list(time_lines(config, launch, 128, 100_000))


def test_every_figure_has_an_error_and_a_source() -> None:
    lines = report("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel")
    assert "waits for its host" in lines.pop(2)
    assert lines[0] == "machines    16 x NVIDIA H100 SXM 80GB, 8 in a node"
    assert re.match(
        r"time        \S+ m?s a step, \+-\d+%; [\d,]+ tokens/s; [\d,]+ tokens/s and \d+ TFLOP/s on", lines[1]
    )
    assert "all 10 steps" in lines[2] and "tokens per parameter" in lines[2]
    assert "of the ranks' time in the pipeline is bubble" in lines[3]
    parts = lines[5:]
    assert len(parts) >= 7
    for line in parts:
        assert re.match(r"            [a-z0-9 -]+ +[\d,.]+ +[\d.]+% +\+-\d+%  \S", line), line


def test_a_run_that_waits_for_its_host_says_how_far_such_predictions_were_off() -> None:
    note = "            the GPU waits for its host: such steps took 15% less to 34% more than predicted"
    assert report()[2] == note
    assert note not in report("--cuda-graph-impl local --hidden-size 4096 --seq-length 4096")


def test_work_of_adapters_without_a_known_time_is_named() -> None:
    flags = "--lora-rank 4 --pretrained-checkpoint base"
    assert not any("not counted" in line for line in report(flags))
    found = report(f"{flags} --lora-dropout 0.1 --use-dora --lora-base-weights nf4")
    assert [line.strip() for line in found if "not counted" in line] == [
        "not counted: dropout of adapters (--lora-dropout), norms of adapted weights (--use-dora), decoding of weights "
        "in 4 bits (--lora-base-weights)"
    ]


def test_an_assumed_node_is_named() -> None:
    assert "8 in a node (assumed; --gpus-per-node tells it)" in report(node=None)[0]


def test_a_figure_without_a_source_is_refused() -> None:
    assert report("--gpu l40s")[1] == (
        "time        not predicted: NVIDIA L40S 48GB has no known rate between nodes: give --link, such as --link 400Gb"
    )
    assert report("--gpu l40s --link 100Gb")[1].startswith("time        ")


@pytest.mark.parametrize(
    ("flags", "message"), [("--gpu h1", "--gpu h1: no such GPU"), ("--link x", "--link x: expect")]
)
def test_wrong_flags(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        report(flags)


def test_the_picture(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    lines = report(f"--pipeline-model-parallel-size 2 --plot {folder}")
    assert lines[-1] == f"picture     {folder / 'step.svg'}"
    text = (folder / "step.svg").read_text()
    assert text.startswith("<svg") and " ms, bubble " in text and text.count("rank ") == 2
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--plot .*file: .*step.svg cannot be written: "):
        report(f"--plot {tmp_path / 'file'}")
