"""A run on one and two GPUs in bf16 gives the losses of the CPU in float32, and its loop never waits for the device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import gpu_runs
from support.gpu_runs import DROPOUT, FLAGS, ITERATIONS, RUNS, WATCHED
from support.gpus import need_room

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def run(command: list[object], **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of real text: sources of Python's library, a tokenizer trained on them, prepared by our tools."""
    import quickstart

    folder = tmp_path_factory.mktemp("data")
    with open(folder / "text.jsonl", "w") as lines:
        for number, text in enumerate(quickstart.python_sources()):
            if number % 8 == 0:
                lines.write(json.dumps({"text": text}) + "\n")
    tools = ROOT / "tools"
    run([sys.executable, tools / "train_tokenizer.py", "--input", folder / "text.jsonl", "--vocab-size", 2048,
         "--output-dir", folder / "tok"])  # fmt: skip
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", f"{folder}/tok/vocab.json",
                 "--merge-file", f"{folder}/tok/merges.txt"]  # fmt: skip
    run([sys.executable, tools / "preprocess_data.py", "--input", folder / "text.jsonl", "--output-prefix",
         folder / "text", *tokenizer, "--append-eod", "--workers", 4])  # fmt: skip
    return [*tokenizer, "--data-path", f"{folder}/text_text_document", "--data-cache-path", f"{folder}/cache"]


def losses(folder: Path, processes: int, *flags: str, gpus: bool) -> list[float]:
    """Train in processes of their own; returns the loss of each iteration."""
    launcher: list[object] = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    metrics = folder / f"metrics-{processes}-{gpus}-{len(flags)}.jsonl"
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    run([*launcher, ROOT / "pretrain_gpt.py", *FLAGS, "--metrics-path", metrics, *flags], **hidden)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["lm loss"] for record in records if "lm loss" in record and "split" not in record]


@pytest.fixture(scope="module")
def on_cpu(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("cpu"), 1, *data, gpus=False)


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("processes", [1, 2])
def test_bf16_on_gpus_follows_float32_on_the_cpu(
    processes: int, data: list[str], on_cpu: list[float], tmp_path: Path
) -> None:
    need_room(processes)
    on_gpu = losses(tmp_path, processes, *data, "--bf16", gpus=True)
    apart = difference(on_cpu, on_gpu)
    print(f"{processes} GPUs: loss {on_gpu[0]:.4f} to {on_gpu[-1]:.4f}, largest difference {apart:.4f}")
    assert len(on_gpu) == ITERATIONS and apart < 0.02
    assert on_gpu[-1] < on_gpu[0] - 1.0, "it has to learn something for this to mean anything"


def test_float32_on_the_gpu_follows_the_cpu_closely(data: list[str], on_cpu: list[float], tmp_path: Path) -> None:
    apart = difference(on_cpu, losses(tmp_path, 1, *data, gpus=True))
    print(f"float32: largest difference {apart:.2e}")
    assert apart < 2e-3


def test_dropout_masks_are_those_of_the_cpu(data: list[str], on_cpu: list[float], tmp_path: Path) -> None:
    flags = [*data, *DROPOUT]
    reference = losses(tmp_path, 1, *flags, gpus=False)
    assert difference(reference, losses(tmp_path, 1, *flags, gpus=True)) < 1e-3
    assert abs(reference[0] - on_cpu[0]) > 1e-4


def watched(words: list[str], *plant: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, gpu_runs.__file__, *plant, *words], capture_output=True, text=True)


@pytest.mark.parametrize("name", WATCHED)
def test_nothing_waits_for_the_device_between_two_log_lines(name: str, data: list[str], tmp_path: Path) -> None:
    done = watched([*RUNS[f"watched {name}"], *data, "--metrics-path", str(tmp_path / "m.jsonl")])
    assert done.returncode == 0 and "took 20 steps" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_watch_bites(data: list[str], tmp_path: Path) -> None:
    words = [*RUNS["watched float32"], *data, "--metrics-path", str(tmp_path / "m.jsonl")]
    done = watched(words, "--plant")
    assert done.returncode != 0 and "synchronizing CUDA operation" in done.stderr
