"""The interface of log writers: every method is optional."""

from datetime import datetime

import pytest

from megatron.training.log.records import Event, LogRecord, LogWriter, Speed, StepRecord, ValidationRecord


def test_a_writer_that_overrides_nothing_ignores_everything() -> None:
    writer = LogWriter()
    writer.steps([StepRecord(1, {"lm loss": 2.0})], Speed(0.5))
    writer.line(LogRecord(datetime(2026, 1, 1), 1, 2, 4, 4, 500.0, None, {}))
    writer.validation(ValidationRecord(1, {}))
    writer.event(Event("save", 1))
    writer.progress(1)
    writer.close()


def test_records_are_frozen_and_share_no_default() -> None:
    first, second = StepRecord(1, {}), StepRecord(2, {})
    assert first.reported == {} and first.reported is not second.reported and first.applied
    with pytest.raises(AttributeError):
        first.iteration = 3  # type: ignore[misc]
