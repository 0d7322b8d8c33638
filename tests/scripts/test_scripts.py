"""Entry scripts of Megatron-LM's releases 0.5 to 0.16 train on this package, in one process and in two.

The scripts themselves are not here. Those in `release_*` are written from facts about them: the names that each release
imports, the attributes that it reads, and how many arguments it gives by position and by which keywords (their list is
tests/data/megatron_lm_script_names.json).
"""

import os
import re
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from support.launch import launch

from megatron.core.utils.rendezvous import start_torch_distributed, started_by_torchrun

ROOT = Path(__file__).parents[2]
RELEASES = ["0.5", "0.6", "0.7", "0.8", "0.9", "0.11", "0.14", "0.15", "0.16"]
GPT = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --eval-iters 1 --eval-interval 2 --log-interval 1 "
    "--num-workers 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 40 --hidden-dropout 0 "
    "--attention-dropout 0 --use-mcore-models"
)


def script(release: str, name: str) -> str:
    return str(ROOT / f"tests/scripts/release_{release.replace('.', '_')}" / name)


def run_scripts(paths: Sequence[str]) -> None:
    """Runs scripts one after the other in this process, as `python PATH` would."""
    if started_by_torchrun():
        start_torch_distributed()  # once for all of them
    for path in paths:
        print(f"=== {path}", flush=True)
        sys.argv[0], sys.path[0] = path, str(Path(path).parent)
        for name in ("gpt_builders", "model_provider", "pretrain_gpt"):  # of another release, or our own
            sys.modules.pop(name, None)
        runpy.run_path(path, run_name="__main__")


def losses_of(
    folder: Path, flags: str, ranks: int, paths: Sequence[str], base: str = GPT, loss: str = "lm loss"
) -> dict[str, list[float]]:
    """What scripts print: the losses of two iterations, of the validations and of the test."""
    cached = f"{flags} --data-cache-path {folder}"  # the order of the made-up samples, which all of them share
    program = launch(cached, ranks, folder, partial(run_scripts, paths), base=base)
    codes = program.exit_codes(280.0)
    texts = [program.output(rank) for rank in range(max(ranks, 1))]
    assert set(codes) == {0}, (codes, *texts)
    found: dict[str, list[float]] = {}
    for text in texts:
        for part in text.split("=== ")[1:]:
            path, _, printed = part.partition("\n")
            losses = [float(loss) for loss in re.findall(rf"{loss}(?: value)?: (\S+)", printed)]
            found[path] = max(found.get(path, []), losses, key=len)  # only one rank prints them
    return found


LAYOUTS = {
    "one process": ("", 0, RELEASES),
    "tensor parallel": ("--tensor-model-parallel-size 2", 2, RELEASES),
    "data parallel": ("", 2, ["0.5", "0.11", "0.16"]),
    "pipeline parallel": ("--pipeline-model-parallel-size 2", 2, ["0.5", "0.11", "0.16"]),
}
"""Flags, number of processes (0: plain python), releases; three releases have every kind of loss function."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt(layout: str, tmp_path: Path) -> None:
    flags, ranks, releases = LAYOUTS[layout]
    ours = str(ROOT / "pretrain_gpt.py")
    theirs = [script(release, "pretrain_gpt.py") for release in releases]
    found = losses_of(tmp_path / "run", flags, ranks, [ours, *theirs])
    assert found.keys() == {ours, *theirs} and len(found[ours]) == 5
    for path in theirs:
        assert found[path] == pytest.approx(found[ours], abs=1e-5), path


CORPUS = ROOT / "tests/data/golden/corpus"
MASKED = (
    "--hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 --lr 1e-2 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 2 --eval-iters 1 --eval-interval 2 --log-interval 1 --num-workers 0 "
    f"--hidden-dropout 0 --attention-dropout 0 --split 80,10,10 --vocab-file {CORPUS}/bert/vocab.txt "
    f"--data-path {CORPUS}/pp/bert_body_document --use-mcore-models "
)
BERT = f"{MASKED} --num-layers 2 --seq-length 32"
T5 = (
    f"{MASKED} --encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 32 --decoder-seq-length 16 "
    "--vocab-extra-ids 20"
)
TWO_PROCESSES = pytest.mark.parametrize(
    ("flags", "ranks"), [("", 0), ("--tensor-model-parallel-size 2", 2)], ids=["one process", "two"]
)


@TWO_PROCESSES
def test_bert(flags: str, ranks: int, tmp_path: Path) -> None:
    paths = [script(release, "pretrain_bert.py") for release in RELEASES]
    found = losses_of(tmp_path / "run", flags, ranks, paths, BERT, "(?:lm|sop) loss")
    first = found[paths[0]]
    assert found.keys() == set(paths) and len(first) == 10
    for path in paths:
        assert found[path] == pytest.approx(first, abs=1e-5), path


@TWO_PROCESSES
def test_t5(flags: str, ranks: int, tmp_path: Path) -> None:
    ours = str(ROOT / "pretrain_t5.py")
    paths = [script(release, "pretrain_t5.py") for release in RELEASES]
    found = losses_of(tmp_path / "run", flags, ranks, [ours, *paths], T5)
    assert found.keys() == {ours, *paths} and len(found[ours]) == 5
    for path in paths:
        early = path in paths[:2]  # they report the mean of micro-batches, whatever their numbers of tokens
        assert found[path] == pytest.approx(found[ours], abs=0.05 if early else 1e-5), path


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("release", ["0.9", "0.11", "0.14", "0.15", "0.16"])
def test_the_loop(release: str, ranks: int, tmp_path: Path) -> None:
    program = launch(
        "", ranks, tmp_path, partial(run_loop, script(release, "run_simple_mcore_train_loop.py"), tmp_path)
    )
    assert set(program.exit_codes(100.0)) == {0}, [program.output(rank) for rank in range(ranks)]
    for rank in range(ranks):
        assert program.output(rank).count("Losses reduced: [{'lm loss'") == 2
        assert "Successfully loaded the model" in program.output(rank)


def run_loop(path: str, folder: Path) -> None:
    os.chdir(folder)
    runpy.run_path(path, run_name="__main__")
