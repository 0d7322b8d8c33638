"""tools/sweep.py: commands, runs, arrays, results; and the picture of a sweep."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.programs import python

from megatron.core.exceptions import UserError
from megatron.training.log.plot_sweep import last_loss, plot_sweep
from tools import sweep as tool

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --global-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 20 --mock-data "
    "--num-workers 0 --eval-iters 1 --train-iters 2"
)


def write(folder: Path, **changes: object) -> Path:
    content = {
        "save": str(folder / "runs"),
        "flags": FLAGS,
        "script": str(ROOT / "pretrain_gpt.py"),
        "launch": str(python()),
        "vary": {"seed": [1, 2], "width": {16: "--hidden-size 16", 32: "--hidden-size 32"}, "lr": ["1e-3"]},
    }
    path = folder / "sweep.yaml"
    path.write_text(
        yaml.safe_dump(
            {name: value for name, value in (content | changes).items() if value is not None}, sort_keys=False
        )
    )
    return path


def test_each_combination_is_a_run_that_saves_and_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert tool.main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    folder = f"{tmp_path}/runs/seed-1_width-32_lr-1e-3"
    more = f"--seed 1 --hidden-size 32 --lr 1e-3 --save {folder} --load {folder}"
    assert shlex.split(lines[1]) == [str(python()), str(ROOT / "pretrain_gpt.py"), *FLAGS.split(), *more.split()]


def test_runs_are_run_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, vary={"lr": ["1e-3", "no"], "width": {16: "", 32: "--hidden-size 32"}})
    assert tool.main([str(path), "--run", "--index", "1"]) == 0
    assert tool.main([str(path), "--run", "--index", "2"]) == 1
    loss = last_loss(tmp_path / "runs/lr-1e-3_width-32")
    assert loss is not None and 2.5 < loss < 3.5
    printed = capsys.readouterr().out
    assert f"lr-1e-3_width-32: loss {loss:.4f}\nlr-no_width-16: failed with code 2: " in printed
    assert tool.main([str(path), "--results"]) == 0
    assert capsys.readouterr().out.startswith(f"lr-1e-3_width-32: loss {loss:.4f}\nlr-1e-3_width-16: no loss yet\n")
    assert plot_sweep(tmp_path / "runs", tmp_path / "sweep.png").stat().st_size > 1000  # against the width
    with pytest.raises(UserError, match="none of lr is a number in each run of this sweep"):
        plot_sweep(tmp_path / "runs", tmp_path / "sweep.png", against="lr")


def test_the_script_for_slurm_runs_one_task_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert tool.main([str(path), "--slurm"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-3\n" in script
    assert script.rstrip().endswith(f"{path} --run --index $SLURM_ARRAY_TASK_ID") and sys.executable in script


def test_a_sweep_that_is_ended_lets_its_run_save(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\nfrom pathlib import Path\nhere = Path(__file__).parent\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((here / 'saved').touch(), sys.exit()))\n"
        "(here / 'begun').touch()\ntime.sleep(60)\n"
    )
    path = write(tmp_path, script=str(script))
    program = subprocess.Popen([python(), ROOT / "tools/sweep.py", path, "--run"])
    while not (tmp_path / "begun").exists() and program.poll() is None:
        time.sleep(0.01)
    program.terminate()
    assert program.wait() == 143 and (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"varry": {}}, "unknown key 'varry'; the keys are save, flags, vary, script, launch"),
        ({"vary": None}, "vary is missing"),
        ({"vary": {"lr": []}}, "vary: lr: give a list of values, or the words of a command line by value"),
        ({"vary": {"lr": [1, 1]}}, "vary: lr: a value is there twice"),
        ({"vary": ["lr"]}, "vary must map flags to lists of values"),
        ({"vary": {"--lr": [1]}}, "vary: --lr: write the flag without its dashes"),
        ({"vary": {"data-path": ["../a"]}}, "vary: data-path: ../a has a /; name each value: {NAME: --flag ../a}"),
        ({"save": ["a"]}, "save must be a text"),
        ({"flags": "--data-path 'a"}, "--data-path 'a: no closing quotation"),
        (
            {"flags": "--load a"},
            "--load is set by the sweep, so that each run continues in its own folder; leave it out "
            "(--pretrained-checkpoint starts all runs from the same weights)",
        ),
    ],
)
def test_a_bad_file_is_one_sentence(
    tmp_path: Path, changes: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, **changes)
    assert tool.main([str(path), "--run"]) == 2
    assert capsys.readouterr().err == f"error: {path}: {message}\n"
    assert not (tmp_path / "runs").exists()
