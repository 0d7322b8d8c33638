"""Batch sizes over a run."""

from collections.abc import Iterator

import pytest

from megatron.core.exceptions import UserError
from megatron.facades import num_microbatches_calculator as facade


@pytest.fixture
def clean() -> Iterator[None]:
    facade.destroy_num_microbatches_calculator()
    yield
    facade.destroy_num_microbatches_calculator()


@pytest.mark.usefixtures("clean")
def test_megatron_lm_functions() -> None:
    with pytest.raises(UserError, match="init_num_microbatches_calculator first"):
        facade.get_num_microbatches()
    facade.init_num_microbatches_calculator(0, [8, 8, 300], 32, 2, 2)
    with pytest.raises(UserError, match="exists already"):
        facade.init_num_microbatches_calculator(0, None, 32, 2, 2)
    facade.update_num_microbatches(100)
    assert (facade.get_num_microbatches(), facade.get_current_global_batch_size()) == (4, 16)
    facade.reconfigure_num_microbatches_calculator(0, None, 30, 4, 2, True)
    assert facade.get_current_global_batch_size() == 30
    assert facade.get_current_running_global_batch_size() == 24
    assert facade.get_micro_batch_size() == 4
    with pytest.raises(UserError, match="three numbers"):
        facade.reconfigure_num_microbatches_calculator(0, [8, 8], 32, 2, 2)
