"""Every command of README.md and docs/ runs as it is printed.

A fenced block marked `bash` is run; other blocks are for reading. The blocks of one page run in order, in one folder
that looks like a fresh checkout with a small corpus (corpus.jsonl) and its tokenizer (vocab.json, merges.txt).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.ports import free_port
from support.programs import commands, python

from megatron.training.log.jsonl import read_metrics
from megatron.training.log.plot_sweep import last_loss

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/custom_model/README.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), EXAMPLE]
NOT_HERE = {"make test", "make quickstart"}  # the first would run this test, the second has one of its own below


def bash_blocks(page: Path) -> list[str]:
    return [block.strip() for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.M | re.S)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    # A link: copying 500 files takes longer than many commands, and machine code and bytecode are cached beside them.
    (tmp_path / "megatron").symlink_to(ROOT / "megatron")
    for name in ("tools", "benchmarks", "examples", "tests/data/golden/corpus"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in (*sorted(script.name for script in ROOT.glob("pretrain_*.py")), "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    corpus = ROOT / "tests/data/golden/corpus"
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(corpus / "gpt2bpe" / name, tmp_path / name)
    shutil.copytree(corpus / "hf", tmp_path / "tokenizer")
    shutil.copy(corpus / "corpus.jsonl", tmp_path / "corpus.jsonl")
    return tmp_path


def environment() -> dict[str, str]:
    """Variables under which a page runs: `python` and `torchrun` are those of `support.programs`, which start processes
    that have imported the product before. `tests/tools/test_programs.py` runs every program with its own imports, and a
    test below starts new interpreters.

    PYTHONPATH is left out, because a reader does not set it and it would hide a file that the checkout lacks.
    """
    path = f"{commands()}{os.pathsep}{os.environ['PATH']}"
    # The quickstart's full size is for users; here it is run small, in the environment of this test.
    make = {"MAKEFLAGS": f"PYTHON={python()}", "QUICKSTART_TOKENS": "12000"}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, **make, "PATH": path, "OMP_NUM_THREADS": "1", "PET_MASTER_PORT": str(free_port())}


def test_every_page_is_found() -> None:
    assert {"README.md", "quickstart.md", "data.md"} <= {page.name for page in PAGES}
    assert bash_blocks(ROOT / "README.md")[:2] == ["make quickstart", "make test"]


PAGES_WITH_COMMANDS = [page for page in PAGES if bash_blocks(page)]


def name_of(page: Path) -> str:
    return "README.md" if page.parent == ROOT else f"{page.parent.name}/{page.name}"


RECIPES = ROOT / "docs/recipes.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES_WITH_COMMANDS if page != RECIPES], ids=name_of)
def test_commands_of_page_run(page: Path, checkout: Path) -> None:
    run_blocks(page, bash_blocks(page), checkout)


# The example's model itself is tested in tests/examples. The slow pages begin with commands like those of the README.
@pytest.mark.slow_cases(
    "docs/data.md", "docs/checkpoints.md", "docs/planning.md", "docs/handing_on.md", "docs/parallelism.md",
    "docs/moe.md", "docs/adapting.md", "docs/recipes.md",
)  # fmt: skip
@pytest.mark.parametrize("page", [page for page in PAGES_WITH_COMMANDS if page != EXAMPLE], ids=name_of)
def test_first_command_of_page_runs(page: Path, checkout: Path) -> None:
    first = next(block for block in bash_blocks(page) if block not in NOT_HERE)
    run_blocks(page, [first_command(first)], checkout)


def first_command(block: str) -> str:
    """Returns the block up to its first program, with the lines before it that write files."""
    lines = block.splitlines(keepends=True)
    program = re.compile(r"(\w+=\S+ )*(python|torchrun|make|bash|examples/|tools/)")
    first = next(number for number, line in enumerate(lines) if program.match(line))
    last = next(number for number in range(first, len(lines)) if is_whole("".join(lines[: number + 1])))
    return "".join(lines[: last + 1])


def is_whole(text: str) -> bool:
    """Tells whether a command does not go on in the next line."""
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    return checked.returncode == 0 and not checked.stderr and not text.endswith("\\\n")


def run_blocks(page: Path, blocks: list[str], checkout: Path) -> None:
    variables = environment()
    for block in blocks:
        if block in NOT_HERE:
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=checkout, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{page.name}:\n{block}\n\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
def test_recipes_do_what_their_page_says(checkout: Path) -> None:
    run_blocks(RECIPES, bash_blocks(RECIPES), checkout)
    runs = {name: read_metrics(checkout / f"runs/{name}/metrics.jsonl") for name in ("trunk", "annealed", "rewarmed")}
    rates = {name: dict(zip(*run.series("learning rate"), strict=True)) for name, run in runs.items()}
    losses = {name: dict(zip(*run.series("lm loss"), strict=True)) for name, run in runs.items()}
    assert [*rates["trunk"]] == [*range(1, 61)], "the trunk was extended"
    assert {rates["trunk"][iteration] for iteration in range(6, 61)} == {1e-2}
    assert [*rates["annealed"]] == [*range(21, 41)]
    assert losses["annealed"][21] == losses["trunk"][21], "the branch continues the trunk, on its data"
    fall = [rates["annealed"][iteration] for iteration in range(21, 41)]
    assert fall == sorted(fall, reverse=True) and fall[0] > 9e-3 and fall[-1] < 1e-3
    assert losses["annealed"][40] != losses["trunk"][40]
    assert [*rates["rewarmed"]] == [*range(1, 31)]
    assert rates["rewarmed"][1] < rates["rewarmed"][5] < rates["rewarmed"][11] == max(rates["rewarmed"].values())
    assert losses["rewarmed"][1] < losses["trunk"][1], "it starts from trained weights"
    swept = json.loads((checkout / "runs/rates/sweep.json").read_text())
    assert len(swept) == 6 and all(last_loss(checkout / "runs/rates" / run["name"]) for run in swept)
    for picture in ("annealed.png", "rewarmed.png", "rates.png"):
        assert (checkout / picture).read_bytes()[:4] == b"\x89PNG", picture


@pytest.mark.slow
def test_torchrun_starts_new_interpreters(checkout: Path) -> None:
    """The other tests of this file run programs in processes that have imported the product before."""
    # Long samples: all mock data, which these processes shuffle, has fewer of them.
    flags = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 256 --max-position-embeddings 256"
    flags += " --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --log-interval 1 --lr 1e-3 --eval-iters 0"
    flags += " --mock-data --tokenizer-type NullTokenizer --vocab-size 20 --tensor-model-parallel-size 2"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*torchrun, "pretrain_gpt.py", *flags.split()],
        cwd=checkout,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"iteration +2/ +2 ", done.stdout), done.stdout


@pytest.mark.slow
def test_quickstart_leaves_what_it_promises(checkout: Path) -> None:
    variables = environment()
    done = subprocess.run(["make", "quickstart"], cwd=checkout, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = checkout / "runs/quickstart"
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) >= {"bits_per_byte", "bigram_bits_per_byte", "seconds", "tokens"}
    assert 0 < summary["bits_per_byte"] < 8 and 0 < summary["bigram_bits_per_byte"] < 8
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "sample.txt").read_text().strip()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    iterations = [
        record["iteration"] for record in records if "lm loss" in record and record.get("split", "train") == "train"
    ]
    assert iterations == sorted(set(iterations)), "one line an iteration, across the stop and the resume"
