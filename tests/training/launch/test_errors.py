"""Mistakes of a user: printed once, exit code 2."""

import atexit
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.programs import python
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.core.declarations.config_fields import FieldError
from megatron.core.exceptions import UserError
from megatron.core.transformer.enums import AttnBackend
from megatron.training.launch.errors import (
    end_process_at_exit,
    exit_with_error_of_rank,
    exit_with_problems,
    write_launcher_error_file,
)

ROOT = Path(__file__).parents[3]


def test_the_first_rank_prints_and_the_others_leave_it_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends all ranks when one has ended: none may end before the sentence is out."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for rank, seconds, printed in (("0", [], "error: a sentence\n"), ("1", [5.0], "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            exit_with_problems(UserError("a sentence"))
        assert (end.value.code, slept, capsys.readouterr().err) == (2, seconds, printed)


def test_fields_of_a_config_are_spelled_as_flags(capsys: pytest.CaptureFixture[str]) -> None:
    config = SimpleNamespace(attention_backend=AttnBackend.flash, num_moe_experts=4)
    error = FieldError(["{attention_backend} cannot do {num_moe_experts:name} {{x}}"], config)
    assert str(error) == "attention_backend flash cannot do num_moe_experts {x}"
    with pytest.raises(SystemExit):
        exit_with_error_of_rank(error)
    assert capsys.readouterr().err.endswith("--attention-backend flash cannot do --num-experts {x}\n")


def test_torchrun_reads_the_sentence_and_keeps_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_launcher_error_file("error: one\nerror: two")
    write_launcher_error_file("error: a consequence")
    failure: Any = ProcessFailure(0, 1, 2, str(path))
    assert failure.message["message"] == "error: one"
    assert failure.message["extraInfo"]["py_callstack"] == "error: one\nerror: two"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_error_of_one_rank_is_printed_with_the_rank(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as end:
        exit_with_error_of_rank(UserError("a sentence"))
    assert end.value.code == 2 and capsys.readouterr().err == f"error on rank {rank}: a sentence\n"
    assert f"error on rank {rank}: a sentence" in (tmp_path / "error.json").read_text()


SCRIPT = """
from megatron.core.exceptions import UserError
from megatron.training.launch.errors import exit_with_problems
exit_with_problems(UserError("the flag --x is wrong"))
"""


def test_the_sentence_comes_last_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [python(), "-m", "torch.distributed.run", "--nproc_per_node", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and done.stderr.count("the flag --x is wrong") == 2
    assert done.stderr.rstrip("=\n ").endswith("error: the flag --x is wrong")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("a sentence"), 2),
        (RuntimeError("another rank is gone"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit("a sentence"), 1),
        (SystemExit(), 0),
    ],
)
def test_a_failed_rank_runs_its_exit_functions_and_ends_without_the_interpreters_shutdown(
    error: BaseException, code: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    child = os.fork()
    if child == 0:  # the functions that pytest registered are not for it
        atexit._clear()
        with log.open("w", buffering=1) as file:
            sys.stdout = file
            atexit.register(print, "an exit function that was there before")
            end_process_at_exit(error)
            atexit._run_exitfuncs()
            print("never reached")
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    assert log.read_text() == "an exit function that was there before\n"
