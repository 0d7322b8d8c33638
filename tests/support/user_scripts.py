"""Runs the entry scripts of tests/scripts, and knows their command lines.

`python user_scripts.py SCRIPT ... -- FLAGS` runs scripts one after the other with the same flags, alone or under
torchrun.
"""

import os
import re
import runpy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.core.utils.rendezvous import start_torch_distributed, started_by_torchrun

ROOT = Path(__file__).parents[2]
RELEASES = ["0.5", "0.6", "0.7", "0.8", "0.9", "0.11", "0.14", "0.15", "0.16"]
LOOP_RELEASES = ["0.8", "0.9", "0.11", "0.14", "0.15", "0.16"]
LOOP = "run_simple_mcore_train_loop.py"

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


def script(release: str, name: str) -> str:
    """Returns the path of a release's script."""
    return str(ROOT / f"tests/scripts/release_{release.replace('.', '_')}" / name)


def entry_scripts(kind: str, releases: Iterable[str] = RELEASES) -> list[str]:
    """Returns the paths of the releases' pretrain_gpt.py, pretrain_bert.py or pretrain_t5.py."""
    return [script(release, f"pretrain_{kind}.py") for release in releases]


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


def run_loop(path: str, folder: Path) -> None:
    """Runs a loop, which writes into the current folder."""
    os.chdir(folder)
    runpy.run_path(path, run_name="__main__")


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
