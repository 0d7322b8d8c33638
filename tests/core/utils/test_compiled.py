"""Kernels: compiled at the first call, in one thread at a time, and without a cache where none can be written."""

import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numba
import numpy as np
import pytest

import megatron.core.utils.compiled as module
from megatron.core.utils.compiled import compiled, compiled_inline

KERNEL = """
import sys
from compiled import compiled

@compiled
def total(n: int) -> int:
    found = 0
    for i in range(n):
        found += i
    return found

assert "numba" not in sys.modules
assert total(10) == 45 and total(11) == 55
assert "numba" in sys.modules
"""


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


def test_kernels_call_kernels_of_their_file() -> None:
    assert _sum(np.arange(5)) == 20 and _twice(4) == 8
    assert type(_sum.machine_code).__name__ == "CPUDispatcher"  # type: ignore[attr-defined]


def test_a_kernel_keeps_its_name_and_docstring_and_is_pickled_by_name() -> None:
    assert (_sum.__name__, _sum.__doc__, _sum.__module__) == ("_sum", "The sum of twice each value.", __name__)
    assert pickle.loads(pickle.dumps(_sum)) is _sum


def test_a_cache_folder_that_fills_up_is_told_and_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(cache: bool = False, **options: object):
        def full(*arguments: int) -> int:
            raise OSError(28, "No space left on device")

        return lambda function: full if cache else function

    monkeypatch.setattr(numba, "njit", njit)

    @compiled
    def double(x: int) -> int:
        return 2 * x

    with pytest.warns(UserWarning, match="No space left"):
        assert double(4) == 8
    assert double(5) == 10


def test_threads_hand_a_kernel_to_numba_once_and_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing and wrapping runs Python's parser, which two threads must not do at the same time."""
    busy = threading.Semaphore(1)
    calls = []

    def njit(**options: object):
        def wrap(function):
            assert busy.acquire(blocking=False), "two threads at once"
            calls.append(function.__name__)
            pause.wait(0.02)
            busy.release()
            return function

        return wrap

    monkeypatch.setattr(numba, "njit", njit)
    pause, failures = threading.Event(), []

    @compiled
    def one(x: int) -> int:
        return x

    @compiled
    def other(x: int) -> int:
        return x

    def call(kernel) -> None:
        try:
            kernel(1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(kernel,)) for kernel in (one, other, one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and sorted(calls) == ["one", "other"]


@pytest.mark.slow
def test_the_app_and_the_datasets_do_not_import_numba() -> None:
    code = (
        "import sys, pretrain_gpt, megatron.data.datasets.blended_megatron_dataset_builder,"
        "megatron.data.datasets.bert_dataset, megatron.data.datasets.t5_dataset, megatron.training.data.splits;"
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=480, cwd=Path(__file__).parents[3])


def test_an_installation_without_any_place_for_machine_code(tmp_path):
    shutil.copy(Path(module.__file__), tmp_path / "compiled.py")
    (tmp_path / "kernel.py").write_text(KERNEL)
    # Files where folders should be: nobody can write there, superusers included.
    (tmp_path / "__pycache__").write_text("")
    (tmp_path / "home").write_text("")
    environment = {"HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    command = [sys.executable, "kernel.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    assert "cannot be cached" in done.stderr
