"""Settings, options and fixtures of all tests."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import distribution, fast_cases, huge_pages, interpreter

# Tests compute little, so several threads would only slow each other down. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes import the package, so its compiled files must be written.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Ranks of a world wait for each other all the time. The scheduler lets a batch process run on when another one wakes
# up, which saves a fifth of the system time.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(PermissionError):  # of a container
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Imports and collection make millions of objects that stay; looking for garbage among them takes seconds.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests of one process that take milliseconds")


def pytest_configure(config: pytest.Config) -> None:
    """Hides the GPUs of the machine unless tests with the gpu marker run."""
    asked = config.getoption("-m")
    if "gpu" not in asked or "not gpu" in asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads this at import: its kernels run on a CPU


def pytest_sessionstart() -> None:
    """Makes mock data small; imports the product only now, after its environment is set."""
    from support import mock_data

    mock_data.make_small()


@pytest.fixture(autouse=True)
def no_warning_was_given_before() -> None:
    """Forgets which warnings earlier tests of this process have caused or printed themselves."""
    warn = sys.modules.get("megatron.core.utils.warn")
    if warn is not None:
        warn.leave_out(())
        warn._warn_once.cache_clear()


@pytest.fixture(autouse=True)
def nothing_distributed_is_left() -> Iterator[None]:
    """Ends the run and the groups that a test made by Megatron-LM's functions, so that the next test can make its own.
    A process group of torch.distributed that is left over is an error of the test."""
    yield
    initialize = sys.modules.get("megatron.facades.initialize")
    if initialize is not None:
        initialize._resources.close()
    parallel_state = sys.modules.get("megatron.facades.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a process group of torch.distributed, which later tests would find")


@pytest.fixture(autouse=True)
def torch_varies_again() -> Iterator[None]:
    """Ends the deterministic mode of a run in this process: later tests expect the kernels of other runs."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the tests of a GPU if none of them is to run: it takes seconds to collect them."""
    return True if "not gpu" in config.getoption("-m") and collection_path == Path(__file__).parent / "gpu" else None


def pytest_itemcollected(item: pytest.Item) -> None:
    fast_cases.mark_slow(item)


def draw_no_constants_of_the_product() -> None:
    """Hypothesis also draws constants that it finds in our files, for which it parses all of them once in each worker:
    seconds, and other examples after any change."""
    with contextlib.suppress(ImportError):  # in releases without these constants
        from hypothesis.internal.conjecture import providers

        if hasattr(providers, "_get_local_constants"):
            providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "hypothesis" in sys.modules:
        draw_no_constants_of_the_product()
    if not any("[" in argument for argument in config.args):  # else not all cases of a test are collected
        unknown = fast_cases.names_without_case(items)
        if unknown:
            raise pytest.UsageError(f"markers name cases that do not exist: {', '.join(unknown)}")
    items.sort(key=lambda item: distribution.place_of(item.nodeid))
    if config.getoption("--quick"):
        left_out = [item for item in items if not distribution.is_quick(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """Takes the objects of modules and collected tests, millions, out of all later garbage collections, and makes forks
    of this process cheap. Imports are done, so Triton's interpreter can be made faster."""
    interpreter.patch_once()
    gc.collect()
    gc.freeze()
    gc.enable()
    huge_pages.collapse()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return distribution.make_scheduler(config, log)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a small corpus of uneven documents."""
    from support.runs import write_documents  # imports the product

    return write_documents(tmp_path_factory.mktemp("corpus") / "text")
