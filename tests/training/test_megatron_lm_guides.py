"""Commands of Megatron-LM's guides run as they are quoted, shortened in size by flags at their end.

SHOWN lists all of them, with the tests that run them; those about training are in this file.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from support.command_lines import configured
from support.launch import launch
from support.programs import python
from support.runs import GPT, run_script

from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data.tokenizer.null import NullTokenizer
from megatron.diagnosis.memory.rank_memory import rank_memory

ROOT = Path(__file__).parents[2]
BPE = ROOT / "tests/data/golden/corpus/gpt2bpe"

SHOWN = {
    "C1": ("tools/test_preprocess_data.py", "test_the_command_of_the_course"),
    "C2": ("training/test_megatron_lm_guides.py", "test_the_oldest_guide_trains_on_a_cpu"),
    "C3": ("tools/test_preprocess_data.py", "test_the_command_with_a_hugging_face_folder"),
    "C4": ("examples/test_run_simple_mcore_train_loop.py", "test_one_process_and_two", "test_under_torchrun"),
    "C5": ("examples/test_families.py", "test_the_fp8_script_of_megatron_lm"),
    "C6": ("examples/test_megatron_lm_loop.py", "test_two_ranks_and_a_plain_process", "test_the_quoted_size"),
    "C7": ("training/test_megatron_lm_guides.py", "test_a_dry_run_needs_no_other_rank"),
    "C8": ("training/test_megatron_lm_guides.py", "test_flags_of_overlap_are_on_or_say_what_is_missing"),
    "C9": ("training/test_megatron_lm_guides.py", "test_fp8_is_emulated_on_a_cpu"),
    "C10": (
        "training/test_megatron_lm_guides.py",
        "test_experts_over_eight_ranks",
        "test_each_of_eight_ranks_holds_eight_experts",
    ),
    "C11": (
        "training/test_megatron_lm_guides.py",
        "test_an_installation_needs_no_compiler",
        "test_what_an_installation_brings",
    ),
}
"""The tests of each command, by its number."""

CODEPARROT = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 12 --hidden-size 768 "
    "--num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 "
    "--global-batch-size 16 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine "
    "--min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 "
    "--data-path codeparrot_text_document --vocab-file vocab.json --merge-file merges.txt --save checkpoints "
    "--save-interval 1000 --log-interval 100 --eval-interval 1000 --eval-iters 10 "
    "--activations-checkpoint-method uniform"
)
SHORTENED = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 "
SHORTENED += "--global-batch-size 2 --train-iters 3 --eval-iters 1 --log-interval 1"


def pretrain(flags: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Plain `python pretrain_gpt.py` in a folder."""
    return subprocess.run(
        [python(), str(ROOT / "pretrain_gpt.py"), *flags.split()],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_every_command_has_its_tests() -> None:
    assert list(SHOWN) == [f"C{number}" for number in range(1, 12)]
    for number, (file, *names) in SHOWN.items():
        tree = ast.parse((ROOT / "tests" / file).read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert found.issuperset(names), number


def test_the_oldest_guide_trains_on_a_cpu(tmp_path: Path) -> None:
    """float16 with a loss scale, full recompute by its retired flag, GPT-2's tokenizer and the split by default."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(BPE / name, tmp_path)
    ids = np.random.default_rng(0).integers(0, len(json.loads((BPE / "vocab.json").read_text())), 80_000)
    with IndexedDatasetBuilder(str(tmp_path / "codeparrot_text_document.bin"), dtype=np.uint16) as builder:
        for document in ids.astype(np.uint16).reshape(2000, 40):
            builder.add_item(document)
            builder.end_document()
        builder.finalize(str(tmp_path / "codeparrot_text_document.idx"))
    done = pretrain(f"{CODEPARROT} {SHORTENED}", tmp_path)
    assert done.returncode == 0, done.stderr
    for said in (
        "--activations-checkpoint-method uniform: retired; read as --recompute-granularity full --recompute-method",
        "no --split given: data is divided into training, validation and test data as 969,30,1",
        "--fp16 on a CPU: products and sums are computed in float32 and rounded to float16",
        "iteration        3/       3",
        "loss scale: 4294967296.0",
    ):
        assert said in done.stdout, (said, done.stdout)
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "3"


@pytest.mark.fast("True")
@pytest.mark.parametrize("sharded", [False, True])
def test_flags_of_overlap_are_on_or_say_what_is_missing(tmp_path: Path, sharded: bool) -> None:
    flags = "--mock-data --train-iters 2 --eval-iters 0 --log-interval 1 --tensor-model-parallel-size 2 "
    flags += "--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap"
    flags += " --use-distributed-optimizer" if sharded else ""
    program = launch(flags, 4, tmp_path)
    assert program.exit_codes() == [0] * 4, program.output(0)
    said = program.output(0)
    missing = "--overlap-param-gather: has no effect without --use-distributed-optimizer"
    assert (missing in said) != sharded
    assert "--tp-comm-overlap: has no effect without --sequence-parallel" in said
    assert "--overlap-grad-reduce:" not in said  # which is on


@pytest.mark.slow
def test_a_dry_run_needs_no_other_rank(tmp_path: Path) -> None:
    flags = "--dry-run --tokenizer-type NullTokenizer --vocab-size 50257 --tensor-model-parallel-size 4 "
    flags += "--pipeline-model-parallel-size 4 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    flags += "--micro-batch-size 2 --global-batch-size 1024 --seq-length 4096"
    done = pretrain(flags, tmp_path, WORLD_SIZE="128")
    assert done.returncode == 0 and "ranks       128 = tensor 4 x pipeline 4" in done.stdout, done.stderr
    alone = pretrain(flags, tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert "--dry-run: for 16 ranks, the fewest for this layout; set WORLD_SIZE=N for another number" in alone.stdout


EXPERTS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50257 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 2 --eval-iters 0 --log-interval 1 "
    "--expert-model-parallel-size 8 --num-experts 64 --moe-router-topk 2"
)


@pytest.mark.slow
def test_experts_over_eight_ranks(tmp_path: Path) -> None:
    program = launch(EXPERTS, 8, tmp_path, base="")
    assert program.exit_codes() == [0] * 8, program.output(0)
    said = program.output(0) + program.output(7)
    assert "iteration        2/       2" in said
    assert "--expert-model-parallel-size" not in said  # it is honoured as it is


def test_each_of_eight_ranks_holds_eight_experts() -> None:
    config = configured(EXPERTS, base="", ranks=8)
    for entry in rank_memory(config, GPT, NullTokenizer(50257, None, None), 50304):
        weights = [info for info in entry.shard.infos if "ep" in info.sharded_axes and "bias" not in info.name]
        assert sum(info.box.shape[0] for info in weights) == 8 * 2 * 2  # experts, layers, products


def test_fp8_is_emulated_on_a_cpu() -> None:
    flags = "--mock-data --train-iters 3 --eval-iters 0 --bf16"
    exact = run_script(flags, GPT).losses
    rounded = run_script(f"{flags} --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max", GPT)
    assert len(rounded.losses) == 3 and rounded.losses != exact
    assert rounded.losses == pytest.approx(exact, rel=0.05)


def test_what_an_installation_brings() -> None:
    """The extras that the guides name exist, no extension is compiled, and the build needs what is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {"mlm", "dev"} <= project["project"]["optional-dependencies"].keys()
    assert project["build-system"]["requires"] == ["setuptools>=68"]
    assert not [file for kind in ("c", "cpp", "cu", "pyx") for file in (ROOT / "megatron").rglob(f"*.{kind}")]


@pytest.mark.slow
def test_an_installation_needs_no_compiler(tmp_path: Path) -> None:
    """`pip install --no-build-isolation .[mlm,dev]`, where what it depends on is installed."""
    source = tmp_path / "source"
    for folder in ("megatron", "tools"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    install = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index"]
    install += ["--disable-pip-version-check", "--target", str(tmp_path / "installed"), ".[mlm,dev]"]
    environment = {**os.environ, "CC": "/no/compiler", "CXX": "/no/compiler"}
    done = subprocess.run(install, cwd=source, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    code = "import megatron.core; print(megatron.core.__file__)"
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path / "installed")), done.stderr
