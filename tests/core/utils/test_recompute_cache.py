"""Values of a recomputed function are computed once, found by key, and missed aloud."""

import pytest
import torch

from megatron.core.utils.recompute_cache import RecomputeCache, run_once_under_recompute
from megatron.core.utils.recomputed import Recomputed


def test_the_second_pass_finds_the_values_of_the_first_in_any_order() -> None:
    cache, calls = RecomputeCache(), []

    def asked(key: str, value: int) -> int:
        return run_once_under_recompute(
            key, lambda: calls.append(value) or run_once_under_recompute("inside", lambda: value)
        )

    first, second = cache.passes()
    with first:
        assert [asked("a", 1), asked("b", 2), asked("a", 3)] == [1, 2, 3]
    for _ in range(2):  # backward may run twice through a kept graph
        with second:
            assert [asked("b", 4), asked("a", 5), asked("a", 6)] == [2, 1, 3]
    assert calls == [1, 2, 3]
    assert asked("a", 7) == 7  # outside of a recomputed function


def test_a_second_pass_that_takes_another_path_is_an_error() -> None:
    first, second = RecomputeCache().passes()
    with first:
        run_once_under_recompute(("router", "counts"), lambda: 1)
    with second:
        run_once_under_recompute(("router", "counts"), lambda: 1)
        with pytest.raises(RuntimeError, match=r"counts of router, call 2, was not computed"):
            run_once_under_recompute(("router", "counts"), lambda: 1)
        with pytest.raises(RuntimeError, match="losses of router, call 1"):
            run_once_under_recompute(("router", "losses"), lambda: 1)


@pytest.mark.parametrize("outer", [False, True])
def test_a_recomputed_function_counts_once_also_inside_another(outer: bool) -> None:
    calls: list[str] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        run_once_under_recompute("count", lambda: calls.append("counted"))
        calls.append("run")
        return x.sin().cos()

    def whole(x: torch.Tensor) -> torch.Tensor:
        # A new function object in each pass, as a script's own checkpoint(lambda ...) makes it.
        return Recomputed(lambda y: inner(y))(x) * Recomputed(lambda y: inner(y) + 1)(x)

    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (Recomputed(whole) if outer else whole)(x).sum().backward()
    plain = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (plain.sin().cos() * (plain.sin().cos() + 1)).sum().backward()
    assert torch.equal(x.grad, plain.grad)
    assert calls.count("counted") == 2 and calls.count("run") > 2
