"""Megatron-LM's small functions on stages, without process groups."""

import torch

from megatron.core.pipeline_parallel.utils import (
    get_pp_first_rank,
    get_pp_last_rank,
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
    make_viewless_tensor,
)


def test_a_lone_rank_is_first_and_last() -> None:
    assert is_pp_first_stage(None) and is_pp_last_stage(None)
    assert get_pp_first_rank(None) == get_pp_last_rank(None) == 0


def test_virtual_stages() -> None:
    assert [is_vp_first_stage(stage, 3) for stage in range(3)] == [True, False, False]
    assert [is_vp_last_stage(stage, 3) for stage in range(3)] == [False, False, True]
    assert is_vp_first_stage(None, None) and is_vp_last_stage(0, 1)


def test_a_view_loses_its_base_and_keeps_memory_and_gradient() -> None:
    whole = torch.arange(4.0, requires_grad=True) * 2
    assert make_viewless_tensor(whole, True, True) is whole
    view = whole.view(2, 2)
    alone = make_viewless_tensor(view, True, True)
    assert alone._base is None and alone.data_ptr() == whole.data_ptr() and alone.shape == (2, 2)
    (gradient,) = torch.autograd.grad(alone.sum(), view)
    assert torch.equal(gradient, torch.ones(2, 2))
    leaf = make_viewless_tensor(view, False, False)
    assert leaf._base is None and not leaf.requires_grad and leaf.is_leaf
