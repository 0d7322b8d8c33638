"""Ctrl-C while a program imports, and while it runs, ends it with one line and exit code 130."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron import interrupts

ROOT = Path(__file__).parents[1]

ENTRIES = [
    *sorted(ROOT.glob("pretrain_*.py")),
    *sorted(path for path in ROOT.glob("tools/**/*.py") if "is a part of another" not in path.read_text()),
    *sorted(path for path in ROOT.glob("benchmarks/*.py") if "run_main" in path.read_text()),
]

IMPORTS_FOR_EVER = """
import os, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "numpy", "megatron.core"):
            open(os.environ["BEGUN"], "w").close()
            time.sleep(60)
sys.meta_path.insert(0, Slow())
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def heeds_ctrl_c() -> None:
    """Undoes what pytest-xdist does to its workers, whose children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(
    words: list[str], begun: Path, number: signal.Signals = signal.SIGINT, **variables: str
) -> tuple[int, str]:
    """Starts a program, sends a signal once the file exists, and returns the exit code and what was printed."""
    environment = {**os.environ, "BEGUN": str(begun), **variables}
    program = subprocess.Popen(
        [sys.executable, *words], stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT, preexec_fn=heeds_ctrl_c
    )
    end = time.monotonic() + 240
    while not begun.exists() and program.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    program.send_signal(number)
    _, text = program.communicate(timeout=240)
    return program.returncode, text


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "tools/checkpoint/convert.py"])
def test_during_the_imports(tmp_path: Path, script: str) -> None:
    words = ["-S", "-c", IMPORTS_FOR_EVER, script]
    assert interrupted(words, tmp_path / "begun") == (130, "interrupted\n")


def test_one_rank_prints(tmp_path: Path) -> None:
    words = ["-S", "-c", IMPORTS_FOR_EVER, "pretrain_gpt.py"]
    assert interrupted(words, tmp_path / "begun", RANK="1") == (130, "")


def test_every_entry_is_quiet() -> None:
    """Each entry script and tool takes the signal before its first slow import."""
    for path in ENTRIES:
        text = path.read_text()
        quiet = text.index("\n    exit_quietly()")
        slow = ("torch", "numpy", "megatron.core", "megatron.training", "pretrain_", "tools.", "benchmarks.")
        first = min(at for name in slow for word in ("import", "from") if (at := _line_of(text, f"{word} {name}")) > 0)
        assert quiet < first, path
        assert path.name.startswith("pretrain_") or "run_main(main)" in text, path


def _line_of(text: str, words: str) -> int:
    return text.find(f"\n{words}") if f"\n{words}" in text else len(text)


@pytest.mark.parametrize(("number", "end"), [(signal.SIGINT, (130, "interrupted\n")), (signal.SIGTERM, (143, ""))])
def test_a_tool_cleans_up(tmp_path: Path, number: signal.Signals, end: tuple[int, str]) -> None:
    file, begun = tmp_path / "unfinished", tmp_path / "begun"
    program = f"""
import time
from pathlib import Path
from megatron.interrupts import exit_quietly, run_main
def main():
    try:
        Path({str(file)!r}).touch()
        Path({str(begun)!r}).touch()
        time.sleep(60)
    finally:
        Path({str(file)!r}).unlink()
exit_quietly()
run_main(main)
"""
    assert interrupted(["-S", "-c", program], begun, number) == end and not file.exists()


@pytest.mark.parametrize("code", [None, 0, 3])
def test_the_exit_code_of_a_tool(code: int | None) -> None:
    with pytest.raises(SystemExit) as end:
        interrupts.run_main(lambda: code)
    assert end.value.code == code


def test_a_handler_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGINT, mine)
    try:
        interrupts.exit_quietly()
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
