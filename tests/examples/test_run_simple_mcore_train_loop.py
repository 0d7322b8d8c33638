"""The example that needs no application: it trains, saves and loads, and two ranks get the losses of one."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest
from support.processes import run_on_ranks

from megatron.facades import parallel_state

PATH = Path(__file__).resolve().parents[2] / "examples" / "run_simple_mcore_train_loop.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_simple_mcore_train_loop", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder: Path, tensor_parallel: int) -> list[float]:
    os.chdir(folder)
    loop = example()
    loop.ITERATIONS = 6
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    try:
        model, losses = loop.train()
        for _ in range(2):  # over the one of a run before
            loop.save_and_reload(model, folder / "saved")
    finally:
        parallel_state.destroy_model_parallel()
    return losses


@pytest.mark.slow
def test_one_process_and_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = run(tmp_path, 1)
    assert one[-1] < one[0] - 0.5
    assert (tmp_path / "saved" / "manifest.json").exists()
    for losses in run_on_ranks(run, 2, tmp_path, 2):
        assert losses == pytest.approx(one, rel=1e-5)
    assert (tmp_path / "saved" / "rank_00001.safetensors").exists()
