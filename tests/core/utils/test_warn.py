"""A warning is printed once, on the first rank."""

import logging

import pytest

from megatron.core.utils.warn import is_first_rank, leave_out, log_single_rank, warn_on_first_rank


def test_a_warning_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANK", "0")
    for message in ("the first warning of this test", "the first warning of this test", "the second one"):
        warn_on_first_rank(message)
    assert [record.getMessage() for record in caplog.records] == ["the first warning of this test", "the second one"]
    assert {record.name for record in caplog.records} == {"megatron.core"}


def test_other_ranks_are_silent_and_may_still_warn_as_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not is_first_rank()
    warn_on_first_rank("a warning of rank 1")
    assert not caplog.records
    monkeypatch.delenv("RANK")
    assert is_first_rank()
    warn_on_first_rank("a warning of rank 1")
    assert len(caplog.records) == 1


def test_one_rank_of_the_world_logs(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("megatron.core.test_warn")
    log_single_rank(logger, logging.WARNING, "%s of one rank", "a line")
    assert [record.getMessage() for record in caplog.records] == ["a line of one rank"]


def test_what_one_run_prints_itself_is_logged_in_the_next(caplog: pytest.LogCaptureFixture) -> None:
    leave_out(["a line of the first run"])
    warn_on_first_rank("a line of the first run")
    assert not caplog.records
    leave_out(["a line of the second run"])
    warn_on_first_rank("a line of the first run")
    assert [record.getMessage() for record in caplog.records] == ["a line of the first run"]
