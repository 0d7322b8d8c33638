"""Whole programs that strangers wrote against Megatron-LM's documentation (programs/) run here as they are."""

import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from support.launch import launch

PROGRAMS = Path(__file__).parent / "programs"


def run(name: str) -> None:
    sys.argv[0] = str(PROGRAMS / name)
    runpy.run_path(sys.argv[0], run_name="__main__")


def printed(folder: Path, name: str, flags: str, ranks: int) -> str:
    """What all ranks print together."""
    program = launch(flags, ranks, folder, partial(run, name), base="")
    codes = program.exit_codes(200.0)
    text = "".join(program.output(rank) for rank in range(max(ranks, 1)))
    assert set(codes) == {0}, (codes, text)
    return text


def losses(text: str, pattern: str = r"iteration \d+ loss (\S+)") -> list[float]:
    return [float(loss) for loss in re.findall(pattern, text)]


@pytest.mark.fast("--tp 2 --pp 1")
@pytest.mark.parametrize("layout", ["--tp 2 --pp 1", "--tp 1 --pp 2"])
def test_a_model_and_a_loop_of_its_own(layout: str, tmp_path: Path) -> None:
    text = printed(tmp_path / "run", "own_model.py", f"{layout} --iters 6 --ckpt {tmp_path}/kept", 2)
    found = losses(text)
    assert len(found) == 6 and found[-1] < found[0] - 0.3
    assert text.count("checkpoint restored") == 2


def test_experts_with_a_spec_of_their_own(tmp_path: Path) -> None:
    alone = losses(printed(tmp_path / "one", "own_moe.py", "", 1))
    apart = losses(printed(tmp_path / "two", "own_moe.py", "--ep 2", 2))
    assert len(alone) == 4 and alone[-1] < alone[0] - 0.1 and apart == pytest.approx(alone, abs=1e-4)


COUNTING = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --eval-iters 1 --eval-interval 6 --log-interval 1 "
    "--vocab-size 10 --period 5 --report-accuracy --num-workers 0 --hidden-dropout 0 --attention-dropout 0"
)


def test_pretrain_with_data_metrics_and_flags_of_its_own(tmp_path: Path) -> None:
    alone = printed(tmp_path / "one", "own_pretrain.py", COUNTING, 0)
    assert "counting modulo 5" in alone
    found = losses(alone, r"lm loss: (\S+)")
    assert len(found) == 6 and found[-1] < found[0] - 0.2
    assert len(losses(alone, r"sure tokens: (\S+)")) >= 1 and len(losses(alone, r"largest loss: (\S+)")) == 6
    split = printed(tmp_path / "two", "own_pretrain.py", f"{COUNTING} --tensor-model-parallel-size 2", 2)
    assert losses(split, r"lm loss: (\S+)") == pytest.approx(found, abs=1e-4)
