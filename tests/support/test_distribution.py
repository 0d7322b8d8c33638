"""Tests are grouped by file or parity model, and slow ones start first."""

import pytest
from support.distribution import is_quick, place_of, scope_of, takes_seconds


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/core/test_a.py::test_x[1/2]", "tests/core/test_a.py"),
        ("tests/parity/test_layouts.py::test_layout[gpt2/pp2/default]", "tests/parity/test_layouts.py::gpt2"),
        (
            "tests/parity/test_layouts.py::test_layout_in_float32[gpt2/tp2/default]",
            "tests/parity/test_layouts.py::gpt2",
        ),
        ("tests/parity/test_mutations.py::test_there_are_twenty", "tests/parity/test_mutations.py"),
    ],
)
def test_scope_is_the_file_or_the_model_of_a_cell(nodeid: str, scope: str) -> None:
    assert scope_of(nodeid) == scope


def test_slow_tests_are_separate_and_start_first() -> None:
    page = "tests/docs/test_commands.py::test_commands_of_page_run[docs/moe.md]"
    bug = "tests/parity/test_mutations.py::test_a_planted_bug_is_caught[x]"
    assert (scope_of(page), scope_of(bug)) == (page, bug)
    quickstart = "tests/docs/test_commands.py::test_quickstart_leaves_what_it_promises"
    order = [quickstart, page, bug, "tests/training/test_a.py::test_x", "tests/core/test_a.py::test_x"]
    assert sorted({*order}, key=place_of) == order


def test_a_module_that_starts_processes_is_not_quick(request: pytest.FixtureRequest) -> None:
    assert is_quick(request.node)
    request.node.module.run_on_ranks = None
    try:
        assert not is_quick(request.node)
    finally:
        del request.node.module.run_on_ranks


@pytest.mark.parametrize(
    ("nodeid", "seconds"),
    [
        ("tests/core/ops/test_norm.py::test_x[a]", False),
        ("tests/core/ops/test_norm_triton.py::test_x[a]", True),
        ("tests/core/ops/fp8/test_linear.py::test_x", True),
        ("tests/parity/test_compare.py::test_x", True),
        ("tests/training/config/test_flag_table.py::test_of_triton.py", False),
    ],
)
def test_kernels_in_the_interpreter_and_layouts_take_seconds(nodeid: str, seconds: bool) -> None:
    assert takes_seconds(nodeid) == seconds
