"""A CPU run imports nothing that is made for GPUs, and the library imports quickly and alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BANNED = ("triton", "apex", "transformer_engine", "transformer_engine_torch", "cupy", "flash_attn")

GUARD = f"""
import sys
class Banned:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BANNED!r}:
            raise AssertionError(f"a CPU run imported {{name}}")
sys.meta_path.insert(0, Banned())
import torch
def no_cuda(*a, **k):
    raise AssertionError("a CPU run started CUDA")
torch.cuda._lazy_init = no_cuda
"""

RUN = """
import runpy, sys
sys.argv = ["pretrain_gpt.py", *{flags!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


def test_cpu_run_needs_nothing_made_for_gpus(tmp_path: Path) -> None:
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --mock-data --eval-iters 1 "
        "--eval-interval 2 "
        f"--tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 --save {tmp_path / 'ckpt'} --save-interval 2"
    ).split()
    done = python(GUARD + RUN.format(flags=flags, script=str(ROOT / "pretrain_gpt.py")))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "iteration        2/       2" in done.stdout


@pytest.mark.slow
def test_the_guard_bites() -> None:
    done = python(GUARD + "import triton")
    assert done.returncode != 0 and "a CPU run imported triton" in done.stderr


def test_library_import_is_light_and_needs_no_app() -> None:
    heavy = ("numba", "rich", "transformers", "tokenizers")
    known = f"[m for m in sys.modules if m.startswith('megatron.training') or m in {heavy}]"
    code = f"import sys, megatron.core; print({known})"
    assert python(code).stdout.strip() == "[]"
