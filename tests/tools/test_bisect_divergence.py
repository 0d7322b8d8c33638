"""The tool that finds where two runs part: by what they left behind, and by computing them again in two layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.processes import run_on_ranks
from support.runs import TINY, train

from megatron.diagnosis.layout_check.layout_trace import LayoutTrace
from tools.bisect_divergence import main
from tools.verify_layout import trace_of_rank

FLAGS = "--mock-data --train-iters 4 --eval-iters 0 --save-interval 2"


def trace_here(script: Path, words: list[str], steps: int, options: dict[str, Any]) -> LayoutTrace:
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    with pytest.MonkeyPatch.context() as patch:  # as torchrun sets them
        patch.setenv("WORLD_SIZE", str(size))
        patch.setenv("RANK", str(rank))
        return trace_of_rank(script, words, steps, **options)


def run_in_pool(
    script: Path, words: list[str], world_size: int, steps: int, folder: Path, **options: Any
) -> list[LayoutTrace]:
    """Replaces the tool's `run`, which starts new processes."""
    if world_size == 1:
        return [trace_here(script, words, steps, options)]
    return run_on_ranks(trace_here, world_size, script, words, steps, options)


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bisect_divergence.run", run_in_pool)


def command(path: Path, flags: str, ranks: int = 1) -> str:
    path.write_text(f"torchrun --nproc-per-node {ranks} pretrain_gpt.py {TINY} {FLAGS} --fp64 {flags}\n")
    return str(path)


def test_two_layouts_of_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = command(tmp_path / "one.txt", "")
    two = command(tmp_path / "two.txt", "--tensor-model-parallel-size 2", 2)
    assert main([one, two, "--steps", "1", "--tolerance", "1e-9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("equal: ")
    other = command(tmp_path / "other.txt", "--tensor-model-parallel-size 2 --norm-epsilon 1e-3", 2)
    assert main([one, other, "--steps", "1", "--tolerance", "1e-9"]) == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT: the first is in the forward pass: decoder.layers.0.input_layernorm" in printed
    assert "on rank 1 (tp 1, " in printed


@pytest.mark.slow
def test_runs_that_part_later_are_watched_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The learning rate changes the second step's weights first. What is watched moves to that step."""
    words = [command(tmp_path / f"{rate}.txt", f"--lr {rate}") for rate in ("1e-2", "2e-2")]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "watching step 1\n" in printed and "watching step 2\n" in printed
    assert "DIFFERENT: the first is in the forward pass: embedding" in printed and "gradient norm: of step 2" in printed


@pytest.mark.slow
def test_runs_that_part_because_of_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    train(f"{FLAGS} --save {a}")
    train(f"{FLAGS} --save {b} --load {a} --ckpt-step 2 --lr 5e-3 --override-opt-param-scheduler")
    for file in ("metrics.jsonl", "iter_0000002"):
        (b / file).unlink(missing_ok=True)
    (b / "iter_0000002").symlink_to(a / "iter_0000002")
    assert main([str(a), str(b)]) == 1
    printed = capsys.readouterr().out
    assert "tensors differ first in iteration 4; those of iteration 2 are equal" in printed
    assert "  embedding.position_embeddings.weight: by " in printed and "written by rank 0 of the first run" in printed
    assert main([str(a), str(a), "--rerun"]) == 0
    assert "metrics: equal in all 4 iterations" in capsys.readouterr().out


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = command(tmp_path / "many.txt", "", 64)
    with pytest.raises(SystemExit) as left:
        main([many, many])
    assert left.value.code == 2 and "ran in 64 processes; --processes 64 allows it" in capsys.readouterr().err
