"""Mistakes of a user: printed once, exit code 2."""

import time

import pytest

from megatron.core.exceptions import UserError
from megatron.training.launch.errors import exit_with_problems


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
