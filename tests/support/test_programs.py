"""Programs that run as forks behave like programs of the real interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import python

EXAMPLES = {
    "arguments": ("import sys; print(sys.argv, sys.stdin.read())", 0),
    "path": ("import sys, os; print(sys.path[0] == '', os.getcwd(), os.environ['TOLD'])", 0),
    "code": ("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", 3),
    "sentence": ("import sys; sys.exit('sentence')", 1),
    "exception": ("def f():\n    raise ValueError('wrong')\nf()", 1),
    "at exit": ("import atexit; atexit.register(print, 'last'); print('first')", 0),
    "threads": ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", 0),
    "interrupt": (  # a program that was started behind a shell ignores the signal until it asks for it
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.kill(os.getpid(), signal.SIGINT)",
        -signal.SIGINT,
    ),
    "signal": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "pool": (
        "import multiprocessing\ndef f(x):\n    return x * x\nif __name__ == '__main__':\n"
        "    with multiprocessing.get_context('fork').Pool(2) as pool:\n        print(pool.map(f, [1, 2]))",
        0,
    ),
    "subprocess": ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(7)'], check=True)", 0),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_fork_behaves_like_the_real_interpreter(name: str, tmp_path: Path) -> None:
    code, expected = EXAMPLES[name]
    variables = {**os.environ, "TOLD": "something"}
    real, ours = (
        subprocess.run(
            [command, "-c", code, "a", "b c"],
            input="text",
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=480,
        )
        for command in (sys.executable, python())
    )
    assert (ours.returncode, ours.stdout) == (real.returncode, real.stdout) and ours.returncode == expected
    assert [line for line in ours.stderr.splitlines() if "^" not in line] == real.stderr.splitlines()


def test_scripts_modules_and_standard_input(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "script.py").write_text("import sys, beside; print(__name__, __file__, sys.argv, beside.NAME)")
    done = subprocess.run([python(), "script.py", "x"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "__main__ script.py ['script.py', 'x'] beside\n", done.stderr
    done = subprocess.run([python(), "-m", "beside"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([python(), "-"], input="print(6)", cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "6\n", done.stderr
    assert subprocess.run([python(), "missing.py"], cwd=tmp_path, capture_output=True).returncode != 0


def test_signals_reach_the_program_and_a_killed_command_ends_it() -> None:
    code = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: exit(5))\nprint(os.getpid(), flush=True)\n"
    )
    code += "while True: time.sleep(0.05)"  # a signal just before a sleep begins is handled after it
    process = subprocess.Popen([python(), "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 5
    process.stdout.close()
    process = subprocess.Popen([python(), "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    assert process.stdout.read() == ""  # end of file: the program has closed it too
    process.wait()
    process.stdout.close()
