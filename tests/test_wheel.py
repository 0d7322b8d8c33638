"""The wheel is enough to prepare data, plan, train and generate: from an empty folder, without the repository."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def words_of(text: str) -> list[str]:
    return text.split()


SMALL = words_of(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 3 --lr 1e-3 --log-interval 1 --eval-iters 0"
)
SIZES = {
    "gpt": ["--seq-length", "32"],
    "bert": ["--seq-length", "32"],
    "t5": words_of("--encoder-seq-length 32 --decoder-seq-length 16 --vocab-extra-ids 4"),
    "hybrid": words_of("--seq-length 32 --hybrid-layer-pattern M* --mamba-num-groups 1"),
}


def shell(command: list[str | Path], folder: Path, **environment: str) -> str:
    """Runs a command without this repository on its path; returns what it printed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy that is a git repository of one commit."""
    copy = tmp_path_factory.mktemp("copy") / "source"
    unused = shutil.ignore_patterns("__pycache__", "*.egg-info", "benchmarks", "build", "dist", "docs", "tests", ".*")
    shutil.copytree(ROOT, copy, ignore=unused)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(copy)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        shell([*git, *words], copy)
    built = copy.parent / "built"
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(copy)]
    shell([sys.executable, "-m", "pip", *words], copy)
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of programs of an environment with the wheel. Its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    shell([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file names is searched, but its own .pth files are not read: an editable installation of this
    # repository stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    words = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    shell([sys.executable, "-m", "pip", "--python", folder / "bin/python", *words], folder)
    yield folder / "bin"


@pytest.mark.slow
def test_text_to_a_model(programs: Path, tmp_path: Path) -> None:
    text = "the wheel trains a model of this text\n"
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text * n}) + "\n" for n in range(1, 40)))
    words = words_of("train-tokenizer --input corpus.jsonl --output-dir . --vocab-size 300")
    shell([programs / "python", "-m", "megatron", *words], tmp_path)
    tokenizer = words_of("--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt")
    words = words_of("--input corpus.jsonl --output-prefix corpus --append-eod --workers 1")
    shell([programs / "megatron-preprocess", *words, *tokenizer], tmp_path)
    data = ["--data-path", "corpus_text_document", "--split", "100,0,0", *tokenizer, "--save", "kept"]
    run = [programs / "megatron-pretrain", "--nproc_per_node", "2", "gpt", *SMALL, *SIZES["gpt"], *data]
    printed = shell(run, tmp_path, OMP_NUM_THREADS="1")
    assert "iteration        3/       3" in printed or printed.count("lm loss") == 3, printed
    words = ["--load", "kept", "--prompt", "the wheel", "--max-new-tokens", "4"]
    assert "the wheel" in shell([programs / "megatron-generate", *words], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "t5", "hybrid"])
def test_families(programs: Path, tmp_path: Path, family: str) -> None:
    data = words_of("--mock-data --tokenizer-type NullTokenizer --vocab-size 100")
    if family != "hybrid":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
        (tmp_path / "vocab.txt").write_text("\n".join(words))
        data = ["--mock-data", "--vocab-file", "vocab.txt"]
    printed = shell([programs / "megatron-pretrain", family, *SMALL, *SIZES[family], *data], tmp_path)
    assert printed.count("lm loss") == 3, printed


@pytest.mark.slow
def test_own_scripts_and_tools_find_the_entry_scripts(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import pretrain_gpt, model_provider, gpt_builders; print(pretrain_gpt.__file__)")
    found = Path(shell([programs / "python", "own.py"], tmp_path).strip())
    assert found.is_relative_to(programs.parent)
    plan = words_of("--params 125M --gpus 1 --gpu H200 --seq-length 128 --tokens 1B --tokenizer GPT-2 --output plan")
    code = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode not in (0, 3))"
    shell([sys.executable, "-c", code, programs / "megatron-plan", *plan], tmp_path)
    code = (
        "import sys; from megatron.programs import tools_folder; sys.path.insert(0, str(tools_folder().parent)); "
        "from tools.verify_layout import PRETRAIN_GPT, load_script; print(load_script(PRETRAIN_GPT).providers)"
    )
    assert "Providers(" in shell([programs / "python", "-c", code], tmp_path)


@pytest.mark.slow
def test_version_and_contents(wheel: Path, programs: Path, tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    commit = shell(["git", "-C", str(wheel.parents[1] / "source"), "rev-parse", "--short=12", "HEAD"], tmp_path).strip()
    printed = shell([programs / "python", "-m", "megatron", "--version"], tmp_path)
    assert printed.startswith(f"{version} (commit {commit}), names of Megatron-LM ")
    assert shell([programs / "megatron-pretrain", "gpt", "--version"], tmp_path) == printed
    helped = shell([programs / "megatron-plan", "--help"], tmp_path)
    assert helped.startswith("usage: python -m megatron plan [SPECIFICATION]") and "python tools/" not in helped
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("megatron/")]
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {file.name for file in ROOT.glob("*.py")} - {"setup.py"}
    tools = {file.relative_to(ROOT).as_posix() for file in (ROOT / "tools").rglob("*.py")}
    inside = zipfile.ZipFile(wheel).namelist()
    assert {
        name.removeprefix("megatron/checkout/") for name in inside if name.startswith("megatron/checkout/")
    } == tools
