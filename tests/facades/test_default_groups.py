"""The default groups of Megatron-LM's functions: making, reading, overriding and forgetting them."""

from collections.abc import Iterator

import pytest

from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import default_collection
from megatron.facades import default_groups
from megatron.facades.default_groups import (
    extras,
    first_rank_getter,
    group_getter,
    group_of,
    rank_getter,
    rank_of,
    rank_setter,
    size_getter,
    size_of,
    size_setter,
)


@pytest.fixture
def clean() -> Iterator[None]:
    default_groups.destroy_model_parallel()
    yield
    default_groups.destroy_model_parallel()


@pytest.mark.usefixtures("clean")
def test_what_does_not_fit_or_is_to_come_is_refused() -> None:
    with pytest.raises(UserError, match=r"= 2 x 1 x 1 = 2 does not divide the 1 ranks"):
        default_groups.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(UserError, match="not yet: use_sharp, hybrid_context_parallel"):
        default_groups.initialize_model_parallel(use_sharp=True, hybrid_context_parallel=True)
    with pytest.raises(UserError, match="2 x 2 = 4 must multiply to the context parallel size 1"):
        default_groups.initialize_model_parallel(hierarchical_context_parallel_sizes=[2, 2])
    with pytest.raises(UserError, match="2 instances of the optimizer's state do not divide the 1 data and context"):
        default_groups.initialize_model_parallel(num_distributed_optimizer_instances=2)


@pytest.mark.usefixtures("clean")
def test_groups_are_made_once_read_and_forgotten() -> None:
    assert default_groups.is_unitialized() and group_of("tp", check_initialized=False) is None
    with pytest.raises(UserError, match=r"call initialize_model_parallel\(\) first"):
        size_of("tp")
    default_groups.initialize_model_parallel(virtual_pipeline_model_parallel_size=2)
    assert default_groups.is_initialized() and default_groups.groups() is default_collection()
    assert (size_of("tp"), rank_of("pp"), group_of("dp"), extras.virtual_stages) == (1, 0, None, 2)
    with pytest.raises(UserError, match=r"exist already: call destroy_model_parallel\(\) first"):
        default_groups.initialize_model_parallel()
    default_groups.destroy_model_parallel()
    assert default_groups.is_unitialized() and extras.virtual_stages is None


@pytest.mark.usefixtures("clean")
def test_sizes_and_ranks_that_are_set_by_hand() -> None:
    default_groups.initialize_model_parallel()
    size_setter("tp")(4)
    rank_setter("tp")(0)
    assert (size_getter("tp")(), rank_getter("tp")(), first_rank_getter("tp")()) == (4, 0, 0)
    rank_setter("tp")(3)
    assert rank_of("tp") == 3 and rank_of("pp") == 0 and group_getter("tp")() is None
    size_setter("tp")(None)
    rank_setter("tp")(None)
    assert (size_of("tp"), rank_of("tp")) == (1, 0)
    size_setter("tp")(4)
    default_groups.destroy_model_parallel()
    default_groups.initialize_model_parallel()
    assert size_of("tp") == 1
