"""One check: how two results differ, what a second result shows, and injected errors."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.health.rerun_checks import Check, RerunDiagnostic, RerunErrorInjector, diagnose, value_text


def check(values: list[float], rejected: bool = True, tolerance: float = 0.0) -> Check:
    return Check(torch.tensor(values), torch.tensor(rejected), "too large", True, tolerance, None)


def test_differences_are_relative_to_the_first_result_and_nan_equals_nan() -> None:
    nan = float("nan")
    assert check([4.0, 2.0]).difference(check([4.0, 1.0])) == 0.25
    assert check([0.0]).difference(check([3.0])) == 3.0
    assert check([nan, nan]).difference(check([nan, nan])) == 0.0


def test_a_function_of_the_script_may_compare() -> None:
    first = Check(torch.tensor(1.0), torch.tensor(True), "odd", True, 0.0, lambda one, two: float(two - one) * 10)
    assert first.difference(check([3.0])) == 20.0


@pytest.mark.parametrize(
    ("second", "diagnostic", "said"),
    [
        (check([1.0], rejected=False), RerunDiagnostic.TRANSIENT_ERROR, "value 1 is accepted: a transient fault"),
        (check([2.05]), RerunDiagnostic.REPRODUCIBLE_RESULT, "the same again: the data, the model"),
        (check([3.0]), RerunDiagnostic.CHANGING_RESULT, "value 3, which is rejected too and differs by 5.0e-01"),
    ],
)
def test_what_a_second_result_shows(second: Check, diagnostic: RerunDiagnostic, said: str) -> None:
    found, sentence = diagnose(check([2.0], tolerance=0.1), second)
    assert found is diagnostic and sentence.startswith(said)


def test_a_tensor_of_several_values_is_counted() -> None:
    assert value_text(torch.tensor(1234567.0)) == "value 1.23457e+06" and value_text(torch.zeros(3)) == "3 values"


def test_how_often_errors_are_injected() -> None:
    injector = RerunErrorInjector(4)
    assert 200 < sum(injector.is_due() for _ in range(1000)) < 300
    assert not any(RerunErrorInjector(0).is_due() for _ in range(10))
    with pytest.raises(UserError, match="error_injection_type loud: choose from correct_result"):
        RerunErrorInjector(1, "loud")
