"""Starting a run for a script with a loop of its own: what is refused, what ends with the run."""

import pytest

from megatron.core.exceptions import UserError
from megatron.training import initialize


def test_arguments_that_are_not_supported_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"initialize_megatron\(skip_mpu_initialization=...\): not yet"):
        initialize.initialize_megatron(skip_mpu_initialization=True)
    with pytest.raises(UserError, match=r"initialize_megatron\(store=...\): not yet"):
        initialize.initialize_megatron(store=object())
    initialize.refuse("f", {"x": False})


def test_what_belongs_to_a_run_is_closed_with_it_the_last_first() -> None:
    closed: list[int] = []
    for number in (1, 2):
        initialize.close_with_run(lambda number=number: closed.append(number))
    initialize._resources.close()
    assert closed == [2, 1]
    initialize._resources.close()
    assert closed == [2, 1]
