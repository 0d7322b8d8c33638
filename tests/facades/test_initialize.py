"""Starting a run for a script with a loop of its own: what is refused, what ends with the run."""

import atexit

import pytest

from megatron.core.exceptions import UserError
from megatron.facades import initialize


def test_arguments_that_are_not_supported_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"initialize_megatron\(skip_mpu_initialization=...\): not yet"):
        initialize.initialize_megatron(skip_mpu_initialization=True)
    with pytest.raises(UserError, match=r"initialize_megatron\(store=...\): not yet"):
        initialize.initialize_megatron(store=object())
    initialize.refuse("f", {"x": False})


@pytest.mark.parametrize(("error", "ranks", "codes"), [(ValueError(), 2, [1]), (None, 2, []), (ValueError(), 1, [])])
def test_an_uncaught_error_among_ranks_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, ranks: int, codes: list[int]
) -> None:
    ended: list[int] = []
    closed: list[bool] = []
    monkeypatch.setattr(initialize, "end_process", ended.append)
    monkeypatch.setattr(initialize.sys, "last_value", error, raising=False)
    monkeypatch.setattr(initialize.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(initialize.dist, "get_world_size", lambda: ranks)
    initialize.close_with_run(lambda: closed.append(True))
    try:
        initialize._close_at_exit()
    finally:
        atexit.register(initialize._close_at_exit)
    assert ended == codes and closed == [True]


def test_what_belongs_to_a_run_is_closed_with_it_the_last_first() -> None:
    closed: list[int] = []
    for number in (1, 2):
        initialize.close_with_run(lambda number=number: closed.append(number))
    initialize._resources.close()
    assert closed == [2, 1]
    initialize._resources.close()
    assert closed == [2, 1]
