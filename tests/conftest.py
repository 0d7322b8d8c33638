"""What all tests share."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Tests without the gpu marker are about CPUs, also on a machine that has GPUs: there those are hidden."""
    asked = config.getoption("-m")
    if "gpu" not in asked or "not gpu" in asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
