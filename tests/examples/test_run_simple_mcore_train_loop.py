"""The example that needs no application: it trains, saves and loads, and two ranks get the losses of one."""

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from support.ports import free_port
from support.processes import run_on_ranks
from support.programs import commands

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


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    """The command as it is quoted; on a machine with GPUs the same uses nccl."""
    (tmp_path / "examples").symlink_to(PATH.parent)
    environment = {**os.environ, "PET_MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [commands() / "torchrun", "--nproc_per_node=2", "examples/run_simple_mcore_train_loop.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "2 processes, 2 of them tensor parallel" in done.stdout and "every weight is equal to the bit" in done.stdout
