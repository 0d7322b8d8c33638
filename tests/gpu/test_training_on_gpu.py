"""The same run on one and two GPUs in bf16 as on the CPU in float32; and a step that never waits for the device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests/data/golden/corpus"
ITERATIONS = 50

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FLAGS = f"""
--num-layers 4 --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 2 --swiglu
--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length 128 --max-position-embeddings 128
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 8 --train-iters {ITERATIONS} --lr 1e-3
--lr-warmup-iters 5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --eval-iters 0
--tokenizer-type GPT2BPETokenizer --vocab-file {CORPUS}/gpt2bpe/vocab.json --merge-file {CORPUS}/gpt2bpe/merges.txt
--data-path {CORPUS}/pp/gpt2_eod_text_document --split 100,0,0 --log-interval 10
""".split()


def losses(folder: Path, processes: int, *more: str, gpus: bool, extra_code: str = "") -> list[float]:
    """Train in a process of its own (or several); returns the loss of each iteration."""
    metrics = folder / f"metrics-{processes}-{'gpu' if gpus else 'cpu'}-{len(more)}.jsonl"
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = {**os.environ, "MEGATRON_TEST_SYNC": "error" if gpus else ""}
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [*launcher, str(ROOT / "pretrain_gpt.py"), *FLAGS, "--data-cache-path", str(folder / "cache")]
    command += ["--metrics-path", str(metrics), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["lm loss"] for record in records if "lm loss" in record and record.get("split") in (None, "train")]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("cpu"), 1, gpus=False)


@pytest.mark.parametrize("processes", [1, 2])
def test_bf16_on_gpus_follows_float32_on_the_cpu(processes: int, on_cpu: list[float], tmp_path: Path) -> None:
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    on_gpu = losses(tmp_path, processes, "--bf16", gpus=True)
    assert len(on_cpu) == len(on_gpu) == ITERATIONS
    apart = max(abs(a - b) for a, b in zip(on_cpu, on_gpu, strict=True))
    print(f"{processes} GPUs: first loss {on_gpu[0]:.4f}, last {on_gpu[-1]:.4f}, largest difference {apart:.4f}")
    assert apart < 0.02
    assert on_gpu[-1] < on_gpu[0] - 0.5, "it has to learn something for this to mean anything"


def test_float32_on_the_gpu_follows_the_cpu_closely(on_cpu: list[float], tmp_path: Path) -> None:
    on_gpu = losses(tmp_path, 1, gpus=True)
    apart = max(abs(a - b) for a, b in zip(on_cpu, on_gpu, strict=True))
    print(f"float32: largest difference {apart:.2e}")
    assert apart < 2e-3


def test_dropout_masks_are_those_of_the_cpu(on_cpu: list[float], tmp_path: Path) -> None:
    dropout = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--train-iters", "10")
    on_gpu, reference = losses(tmp_path, 1, *dropout, gpus=True), losses(tmp_path, 1, *dropout, gpus=False)
    apart = max(abs(a - b) for a, b in zip(reference, on_gpu, strict=True))
    assert apart < 1e-3 and abs(reference[0] - on_cpu[0]) > 1e-4
