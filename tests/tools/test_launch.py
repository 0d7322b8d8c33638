"""tools/launch.py: a run that fails starts again from its newest checkpoint, and not for ever."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.programs import commands
from support.runs import TINY

from megatron.core.exceptions import UserError
from megatron.launcher import start_time
from tools import launch
from tools.launch import Launcher, Newest, folder_to_save, main, newest_checkpoint, resuming

RUN = """
import os, signal, subprocess, sys, time
folder, plan = sys.argv[1], sys.argv[2].split(",")
what = "wait"
if "RANK" not in os.environ:
    with open(f"{folder}/starts", "a+") as file:
        file.write(" ".join(sys.argv[3:]) + "\\n")
        file.seek(0)
        what = plan[len(file.readlines()) - 1]
if what == "wait":
    if "RANK" not in os.environ:
        sys.exit(subprocess.call([sys.executable, "-IS", *sys.argv], env={**os.environ, "RANK": "0"}))
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    open(f"{folder}/waits", "w").close()
    time.sleep(60)
if what == "leaves":
    code = "import os, time; open(os.sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    subprocess.Popen([sys.executable, "-IS", "-c", code, f"{folder}/left"], start_new_session=True)
    while not os.path.exists(f"{folder}/left") or not os.path.getsize(f"{folder}/left"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if what.startswith("saves"):
    open(f"{folder}/newest", "w").write(f"{what.removeprefix('saves')} {time.time_ns()}")
    sys.exit(1)
if what.startswith("back to"):  # a loss spike: the tracker names an older checkpoint
    open(f"{folder}/newest", "w").write(f"{what.removeprefix('back to')} 1")
    sys.exit(1)
sys.exit(int(what))
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the launcher of a run that follows a plan."""

    def newest(save: Path, local: Path | None) -> Newest | None:
        file = tmp_path / "newest"
        return Newest(*map(int, file.read_text().split())) if file.exists() else None

    monkeypatch.setattr(launch, "newest_checkpoint", newest)
    script = tmp_path / "run.py"
    script.write_text(RUN)

    def make(plan: str) -> Launcher:
        words = [sys.executable, "-IS", str(script), str(tmp_path), plan, "--finetune", "--save", "d", "--load=other"]
        return Launcher(words, Path("d"), wait_seconds=0.0, say=lambda text: None)

    return make


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


FIRST, AGAIN = "--finetune --save d --load=other", "--save d --load d"


def test_a_restart_continues_from_the_checkpoint(launcher, tmp_path: Path) -> None:
    assert launcher("1,saves10,1,1,saves20,1,0").run() == 0
    assert starts(tmp_path) == [FIRST, FIRST, *[AGAIN] * 5]


def test_three_fast_failures_in_a_row_are_the_end(launcher, tmp_path: Path) -> None:
    assert launcher("saves10,1,3,4,0").run() == 4
    assert len(starts(tmp_path)) == 4


def test_an_older_checkpoint_to_which_a_run_went_back_is_no_progress(launcher, tmp_path: Path) -> None:
    assert launcher("saves10,back to 5,1,3,0").run() == 3
    assert len(starts(tmp_path)) == 4
    (tmp_path / "starts").unlink()
    assert launcher("1,1,saves 8,1,0").run() == 0  # newer than 5, though not than the 10 that was given up


def test_a_slow_failure_is_not_counted(launcher, tmp_path: Path) -> None:
    slow = launcher("1,1,1,1,0")
    slow.fast_seconds = 0.0
    assert slow.run() == 0 and len(starts(tmp_path)) == 5


def test_processes_that_a_killed_command_left_are_ended(
    launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LEFT_SECONDS", 0.1)
    said: list[str] = []
    tool = launcher("leaves,0")
    tool.say = said.append
    assert tool.run() == 0 and len(starts(tmp_path)) == 2
    left = int((tmp_path / "left").read_text())
    assert start_time(left) is None
    assert f"processes of the run that are still there are killed: {left}" in said


def test_a_mistake_is_not_tried_again(launcher, tmp_path: Path) -> None:
    assert launcher("2,0").run() == 2 and len(starts(tmp_path)) == 1


def test_a_signal_goes_to_a_rank_and_is_the_end(launcher, tmp_path: Path) -> None:
    def send() -> None:
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    threading.Thread(target=send, daemon=True).start()
    begun = time.monotonic()
    assert launcher("wait,0").run() == 128 + signal.SIGUSR1
    assert time.monotonic() - begun < 50 and signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_before_a_start_is_the_end_too(launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the checkpoints are looked through, no process is there to pass it to."""
    monkeypatch.setattr(launch, "newest_checkpoint", lambda save, local: os.kill(os.getpid(), signal.SIGUSR1))
    assert launcher("0").run() == 128 + signal.SIGUSR1 and not (tmp_path / "starts").exists()


def test_the_words_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "torchrun",
        "p.py",
        "--ckpt-step",
        "5",
        "--save",
        "a",
        "--no-load-optim",
        "--load",
        "b",
        "--lr",
        "1",
        "--save=c",
    ]
    assert folder_to_save(command) == Path("c")
    assert resuming(command, Path("c")) == ["torchrun", "p.py", "--save", "a", "--lr", "1", "--save=c", "--load", "c"]
    with pytest.raises(UserError, match="--save DIR"):
        folder_to_save(["torchrun"])
    assert main(["--", "torchrun"]) == 2 and "has no --save DIR" in capsys.readouterr().err
    assert main(["/no/program", "--save", str(tmp_path)]) == 2
    assert "/no/program cannot be started: No such file" in capsys.readouterr().err
    assert newest_checkpoint(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False, True], ids=["torchrun", "nproc-per-node"])
def test_a_killed_run_goes_on(tmp_path: Path, forks: bool) -> None:
    """A real run of two ranks, one of which is killed once. Ranks that the tool starts itself go on from copies in
    memory, and the losses are those of a run without a kill."""
    script = tmp_path / "run.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from support.runs import GPT\n"
        "from megatron.training import pretrain\n"
        "from megatron.training.hooks.hook import Hook\n"
        "from megatron.training.providers import Providers\n"
        "class Killed(Hook):\n"
        "    def after_step(self, iteration):\n"
        f"        if iteration == {4 if forks else 3} and os.environ['RANK'] == '1' and '--load' not in sys.argv:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "parts = GPT.build_model, GPT.build_datasets, GPT.build_forward_step\n"
        "pretrain(Providers(*parts, build_hooks=lambda context: [Killed()]))\n"
    )
    root = Path(__file__).parents[2]
    flags = f"{TINY} --mock-data --train-iters 5 --eval-iters 0 --save {tmp_path / 'c'} --save-interval 2".split()
    local = f"--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {tmp_path / 'local'}".split()
    start = ["--nproc-per-node", "2", str(script), *flags, *local, "--non-persistent-save-interval", "1"]
    if not forks:
        start = [str(commands() / "torchrun"), "--nproc-per-node", "2", "--standalone", str(script), *flags]
    python = sys.executable if forks else str(commands() / "python")  # the quicker one passes no open files on
    tool = [python, "tools/launch.py", "--wait-seconds", "0", *start]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    done = subprocess.run(tool, cwd=root, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert f"its newest checkpoint is that of iteration {3 if forks else 2}" in done.stderr
    assert "launch: goodput " in done.stderr
    assert "the run ends: rank 1 of 2 ended in training" in done.stderr
    newest = newest_checkpoint(tmp_path / "c")
    assert newest is not None and newest.iteration == 5


def test_seconds_that_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert launch.counted_seconds(path, 0) is None
    lines = ['{"iteration": 4, "ms per iteration": 100.0}', '{"iteration": 5, "ms per iteration": 250.0}']
    path.write_text("\n".join([*lines, '{"iteration": 5, "event": "save"}', '{"torn']))
    assert launch.counted_seconds(path, 0) == pytest.approx(0.35)
    assert launch.counted_seconds(path, 4) == pytest.approx(0.25)


def test_ranks_are_those_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nproc-per-node", "2", "torchrun", "pretrain_gpt.py", "--save", str(tmp_path)]) == 2
    assert "--nproc-per-node starts N ranks of a script" in capsys.readouterr().err


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--"]) == 2
    assert "error: no command; give the command of the run" in capsys.readouterr().err
