"""The scripts of examples/ run as they stand with made-up data, and their sizes are the published models'."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.ports import free_port
from support.programs import commands

from megatron.conversion.exporting import export_model
from megatron.training.config.recipes.catalogue import recipe_named
from pretrain_gpt import build_model

ROOT = Path(__file__).resolve().parents[2]
MIXTRAL, QWEN = ROOT / "examples/mixtral/train_mixtral.sh", ROOT / "examples/qwen3/train_qwen3.sh"
GPT3, LLAMA = ROOT / "examples/gpt3/train_gpt3.sh", ROOT / "examples/llama/train_llama.sh"
DEEPSEEK = ROOT / "examples/deepseek_v3/train_deepseek_v3.sh"
QWEN_NEXT = ROOT / "examples/qwen3_next/train_qwen3_next.sh"
NEMOTRON = ROOT / "examples/nemotron_h/train_nemotron_h.sh"
BERT = ROOT / "examples/bert/train_bert.sh"
LLAMA_FP8 = ROOT / "examples/llama/train_llama3_8b_fp8.sh"


def published(name: str) -> int:
    """The number of parameters of a recipe."""
    return recipe_named(name).parameters


PARAMETERS = {
    (GPT3, "345m"): 354_823_168,
    (GPT3, "175b"): 174_604_259_328,
    (LLAMA, "llama2-7b"): published("llama2-7b"),
    (LLAMA, "llama2-13b"): published("llama2-13b"),
    (LLAMA, "llama2-70b"): published("llama2-70b"),
    (LLAMA, "llama3-8b"): published("llama3-8b"),
    (LLAMA, "llama3-70b"): published("llama3-70b"),
    (DEEPSEEK, "671b"): 671_026_404_352 + 11_610_067_968,
    (MIXTRAL, "8x7b"): published("mixtral-8x7b"),
    (QWEN, "0.6b"): published("qwen3-0.6b"),
    (QWEN, "8b"): published("qwen3-8b"),
    (QWEN, "30b-a3b"): published("qwen3-30b-a3b"),
    (QWEN_NEXT, "80b-a3b"): published("qwen3-next-80b-a3b"),
    (NEMOTRON, "8b"): published("nemotron-h-8b"),
    (NEMOTRON, "30b-a3b"): recipe_named("nemotron3-nano-30b-a3b").published,  # without the biases of its experts
}
"""Number of parameters, as in the recipes, in the paper or in transformers. DeepSeek-V3 includes its prediction layer,
without the copies of embedding and head that the hub adds."""

TINY = {
    (GPT3, "tiny"): None,
    (LLAMA, "tiny"): "LlamaForCausalLM",
    (DEEPSEEK, "tiny"): None,
    (MIXTRAL, "tiny"): "MixtralForCausalLM",
    (QWEN, "tiny"): "Qwen3ForCausalLM",
    (QWEN, "tiny-moe"): "Qwen3MoeForCausalLM",
    (QWEN_NEXT, "tiny"): "Qwen3NextForCausalLM",
    (NEMOTRON, "tiny"): "NemotronHForCausalLM",
    (NEMOTRON, "tiny-moe"): "NemotronHForCausalLM",
}


def run(script: Path, size: str, folder: Path, *flags: str, **environment: str) -> str:
    path = f"{commands()}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [script, folder, *flags],
        env={**os.environ, "PATH": path, "SIZE": size, "OMP_NUM_THREADS": "1", **environment},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_without_the_environment_a_line_says_what_to_activate(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "basename"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    for words, program in (
        ([GPT3], "torchrun"),
        ([GPT3, "c", "--dry-run"], "python"),
        ([BERT, "c", "SAMPLE"], "python"),
    ):
        done = subprocess.run(
            [str(tmp_path / "bash"), *map(str, words)], env={"PATH": str(tmp_path), "SIZE": "tiny"}, cwd=tmp_path,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2 and done.stderr.startswith(f"{program}: not found; activate the environment")


QUICK_SIZES = {"llama-llama3-8b"}


def each(cases: Iterable[tuple[Path, str]], quick: set[str]) -> list[Any]:
    """The cases, of which those of these names are quick."""
    names = {(script, size): f"{script.stem.removeprefix('train_')}-{size}" for script, size in cases}
    assert set(names.values()) >= set(quick)
    return [
        pytest.param(script, size, marks=() if name in quick else pytest.mark.slow, id=name)
        for (script, size), name in names.items()
    ]


@pytest.mark.parametrize(("script", "size"), each(PARAMETERS, QUICK_SIZES))
def test_sizes_are_those_of_the_hub(script: Path, size: str, tmp_path: Path) -> None:
    said = run(script, size, tmp_path / "c", "--dry-run", GPUS_PER_NODE="1", NNODES="1", TP="1", PP="1", EP="1")
    assert f"parameters  {PARAMETERS[script, size]:,}; " in said


@pytest.mark.parametrize(("script", "size"), each(TINY, {"qwen3-tiny-moe"}))
def test_it_trains_and_goes_on_and_is_of_its_family(script: Path, size: str, tmp_path: Path) -> None:
    """On two processes; what it saved is exported as the family's architecture."""
    port = str(free_port())
    flags = ("--train-iters", "6", "--log-interval", "1", "--num-workers", "0", "--eval-iters", "1")
    flags += () if script in (GPT3, MIXTRAL, QWEN, QWEN_NEXT, NEMOTRON) else ("--lr-warmup-iters", "1")
    first = run(script, size, tmp_path / "c", *flags, "--exit-interval", "3", MASTER_PORT=port)
    assert re.search(r"iteration +3/ +6 .* lm loss: ", first)
    second = run(script, size, tmp_path / "c", *flags, MASTER_PORT=port)
    assert "loaded checkpoint of iteration" in second and re.search(r"iteration +6/ +6 .* lm loss: ", second)
    if TINY[script, size] is None:
        return
    done = export_model(tmp_path / "c", tmp_path / "theirs", build_model, log=lambda sentence: None)
    assert done.architecture == TINY[script, size]


SMALL = {
    "NUM_LAYERS": "1", "HIDDEN_SIZE": "32", "FFN_HIDDEN_SIZE": "64", "NUM_HEADS": "4", "NUM_QUERY_GROUPS": "2",
    "KV_CHANNELS": "8", "SEQ_LENGTH": "16", "GLOBAL_BATCH_SIZE": "2", "GPUS_PER_NODE": "1",
}  # fmt: skip


def test_the_fp8_script_of_megatron_lm(tmp_path: Path) -> None:
    """Its four arguments, its variables, and its older name."""
    samples = {"train": 4, "lr-decay": 4, "lr-warmup": 0}
    flags = [word for name, count in samples.items() for word in (f"--{name}-samples", str(count))]
    flags += ["--eval-iters", "1", "--vocab-size", "63", "--num-workers", "0"]
    older = LLAMA_FP8.with_name("train_llama3_8b_h100_fp8.sh")
    said = run(older, "", tmp_path / "c", str(tmp_path / "tb"), "MOCK", "MOCK", *flags, **SMALL)
    assert re.search(r"iteration +2/ +2 .* lm loss: ", said) and list((tmp_path / "tb").iterdir())
    assert (tmp_path / "c/latest_checkpointed_iteration.txt").read_text().strip() == "2"
    words = " ".join(LLAMA_FP8.read_text().split())
    for quoted in (
        "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather",
        "--sequence-parallel", "--apply-layernorm-1p", "--decoupled-lr", "--split \"'99,1,0'\"",
    ):  # fmt: skip
        assert quoted in words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "size", "gibibytes"),
    [(GPT3, "175b", 25), (LLAMA, "llama3-70b", 26), (DEEPSEEK, "671b", 60), (QWEN_NEXT, "80b-a3b", 30)],
)
def test_a_rank_of_the_default_layout_has_room(script: Path, size: str, gibibytes: int, tmp_path: Path) -> None:
    said = run(script, size, tmp_path / "c", "--dry-run")
    memory = re.search(r"^memory +([\d.]+) GiB", said, flags=re.M)
    assert memory is not None and float(memory[1]) < gibibytes


def test_every_folder_has_a_page_that_names_its_script() -> None:
    for script in sorted((ROOT / "examples").glob("*/train_*.sh")):
        assert script.name in (script.parent / "README.md").read_text(), script
        assert os.access(script, os.X_OK)
