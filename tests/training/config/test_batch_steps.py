"""Batch sizes of a schedule, as the rules read them; `test_checks` has the errors."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.config.batch_steps import batch_steps


@pytest.mark.parametrize(
    ("words", "length", "sizes"),
    [("0:4 1K:8", 16, [4, 8]), (None, 16, None), ("0:4 1K", 16, None), ("0:4", None, None)],
)
def test_impossible_schedules_have_no_sizes(words: str | None, length: int | None, sizes: list[int] | None) -> None:
    settings: Any = SimpleNamespace(step_batch_size_schedule=words, seq_length=length)
    found = batch_steps(settings)
    assert (None if found is None else [size for _, size in found.steps]) == sizes
