"""Loops that numba compiles at their first call."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np

from megatron.training.tokenizer.jit import compiled, compiled_inline

ROOT = Path(__file__).parents[3]


@compiled_inline
def _twice(x: int) -> int:
    return 2 * x


@compiled
def _sum(values: np.ndarray) -> int:
    """The sum of twice each value."""
    total = 0
    for value in values:
        total += _twice(value)
    return total


def test_loops_call_loops_of_their_file() -> None:
    assert _sum(np.arange(5)) == 20 and _twice(4) == 8
    assert type(_sum.machine_code).__name__ == "CPUDispatcher"  # type: ignore[attr-defined]


def test_a_loop_keeps_its_name_and_docstring_and_is_pickled_by_name() -> None:
    assert (_sum.__name__, _sum.__doc__, _sum.__module__) == ("_sum", "The sum of twice each value.", __name__)
    assert pickle.dumps(_sum).count(b"_sum") == 1


def test_the_app_does_not_import_numba() -> None:
    code = "import sys, pretrain_gpt; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
