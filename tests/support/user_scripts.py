"""Runs entry scripts, and the programs of tests/support/released, and knows their command lines.

`python user_scripts.py SCRIPT ... -- FLAGS` runs them one after the other with the same flags, alone or under torchrun.
A SCRIPT is the path of a script, or a program and a release, such as gpt@0.16.
"""

import os
import re
import runpy
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # when it is a program

from support.released.bert import Bert
from support.released.facts import RELEASES
from support.released.gpt import Gpt
from support.released.loop import Loop
from support.released.t5 import T5

from megatron.core.utils.rendezvous import start_torch_distributed, started_by_torchrun

ROOT = Path(__file__).parents[2]
PROGRAMS = {"gpt": Gpt, "gpt-with-own-builders": partial(Gpt, own_builders=True), "bert": Bert, "t5": T5, "loop": Loop}

_TWO_ITERATIONS = (
    "--hidden-size 16 --num-attention-heads 2 --lr 1e-2 --train-iters 2 --eval-iters 1 --eval-interval 2 "
    "--log-interval 1 --num-workers 0 --hidden-dropout 0 --attention-dropout 0 --use-mcore-models "
    "--timing-log-level 2 "  # their timer is that of the app
)
_CORPUS = ROOT / "tests/data/golden/corpus"
_MASKED = (
    f"{_TWO_ITERATIONS} --micro-batch-size 2 --global-batch-size 4 --max-position-embeddings 32 --split 80,10,10 "
    f"--vocab-file {_CORPUS}/bert/vocab.txt --data-path {_CORPUS}/pp/bert_body_document "
)
FLAGS = {
    "gpt": f"{_TWO_ITERATIONS} --num-layers 2 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 2 "
    "--global-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 40",
    "bert": f"{_MASKED} --num-layers 2 --seq-length 32",
    "t5": f"{_MASKED} --encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 32 --decoder-seq-length 16 "
    "--vocab-extra-ids 20",
}
"""The command line of each kind of script."""


def programs(kind: str, releases: Iterable[str] = RELEASES) -> list[str]:
    """Returns the names of the releases' programs of a kind."""
    return [f"{kind}@{release}" for release in releases]


def run_scripts(names: Sequence[str]) -> None:
    """Runs scripts and programs one after the other in this process, a script as `python PATH` would. A program then
    prints the facts that it has not used."""
    if started_by_torchrun():
        start_torch_distributed()  # once for all of them
    for name in names:
        print(f"=== {name}", flush=True)
        kind, _, release = name.partition("@")
        if kind in PROGRAMS:
            program = PROGRAMS[kind](release)
            program.start()
            print("unused facts:", program.unused(), flush=True)
        else:
            sys.argv[0], sys.path[0] = name, str(Path(name).parent)
            for module in ("gpt_builders", "model_provider", "pretrain_gpt"):  # of another folder
                sys.modules.pop(module, None)
            runpy.run_path(name, run_name="__main__")


def run_in(folder: Path, names: Sequence[str]) -> None:
    """Runs scripts that write into the current folder."""
    os.chdir(folder)
    run_scripts(names)


def losses_in(texts: Iterable[str], loss: str = "lm loss") -> dict[str, list[float]]:
    """Returns the losses that each script printed, of the iterations, validations and the test, from the output of all
    ranks of `run_scripts`. `loss`: pattern of the names; other numbers of log lines have names, too."""
    found: dict[str, list[float]] = {}
    for text in texts:
        for part in text.split("=== ")[1:]:
            path, _, printed = part.partition("\n")
            losses = [float(value) for value in re.findall(rf"(?:{loss})(?: value)?: (\S+)", printed)]
            found[path] = max(found.get(path, []), losses, key=len)  # only one rank prints them
    return found


if __name__ == "__main__":
    end = sys.argv.index("--")
    given = sys.argv[1:end]
    sys.argv[1:] = sys.argv[end + 1 :]
    run_scripts(given)
