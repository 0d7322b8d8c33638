"""Progress lines in a file."""

import io
import time

import pytest
from rich.console import Console

from megatron.data.preparation.progress import Counts, ProgressDisplay


def test_counts_of_workers_are_added() -> None:
    assert Counts.of_workers([1, 2, 3, 10, 20, 30]) == Counts(11, 22, 33)


def test_a_line_needs_ten_seconds_and_enough_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file = io.StringIO()
    with ProgressDisplay(Console(file=file, width=20), total_bytes=4_000_000, log_interval=5) as display:
        for seconds, documents in ((9.9, 50), (10.0, 4), (20.0, 5), (29.0, 100)):
            now[0] = 100.0 + seconds
            display.update(Counts(1_000_000, documents, 2_500_000))
    assert file.getvalue() == "5 documents | 2.5M tokens | 1.0 of 4.0 MB (25.0%) | 0.1 MB/s | 1:00 left\n"
