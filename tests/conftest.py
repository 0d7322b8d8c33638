"""What all tests share."""

import os
import sys
from collections.abc import Iterator

import pytest

# What tests compute is tiny: threads would only wait for each other, and for the other worker's. Before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes import the product: they are to find it compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """Tests without the gpu marker are about CPUs, also on a machine that has GPUs: there those are hidden."""
    asked = config.getoption("-m")
    if "gpu" not in asked or "not gpu" in asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its kernels run on a CPU


@pytest.fixture(autouse=True)
def no_model_parallel_groups_left() -> Iterator[None]:
    """Ends the groups that a test made by Megatron-LM's functions, so that the next test can make its own."""
    yield
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
