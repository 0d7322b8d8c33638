"""Megatron-LM's marks for profilers: nested, and the same without a GPU."""

import pytest

from megatron.core.utils import nvtx_decorator, nvtx_range_pop, nvtx_range_push


def test_ranges_are_nested() -> None:
    nvtx_range_push("outer")
    nvtx_range_push("inner", suffix="part")
    with pytest.raises(ValueError, match="the innermost range is"):
        nvtx_range_pop("outer")
    nvtx_range_pop("inner", suffix="part")
    nvtx_range_pop()
    with pytest.raises(ValueError, match="the innermost range is"):
        nvtx_range_pop()


def test_a_marked_function_is_the_same_function() -> None:
    @nvtx_decorator(message="work")
    def work(x: int) -> int:
        nvtx_range_push("inside")
        nvtx_range_pop("inside")
        return 1 // x

    assert work(1) == 1 and work.__name__ == "work"
    with pytest.raises(ZeroDivisionError):
        work(0)
    with pytest.raises(ValueError, match="nvtx_range_pop"):
        nvtx_range_pop()
