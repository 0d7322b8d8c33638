"""Runs the entry scripts of a checkout of Megatron-LM on this package:   MEGATRON_LM=FOLDER make test-scripts

Each script trains a tiny model for two iterations on one process, and its losses are compared with those of our own
script. The scripts are copied, so that they find this package and not that of the checkout.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support import user_scripts
from support.user_scripts import FLAGS, ROOT, losses_in

LOOP = "examples/run_simple_mcore_train_loop.py"
TOLERANCE = {"gpt": 1e-5, "bert": 0.05, "t5": 0.05}
"""BERT's scripts, and the older ones of T5, report the mean over micro-batches, ours that over tokens."""
PATTERN = {"gpt": "lm loss|grad norm", "bert": "(?:lm|sop) loss", "t5": "lm loss"}


def run(words: list[str], folder: Path) -> tuple[int, str]:
    """Starts Python in a folder, and returns its exit code and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


def compare(kind: str, script: Path) -> str:
    """Returns what is wrong with a script's run, or nothing."""
    ours = ROOT / script.name
    code, text = run(
        [user_scripts.__file__, str(script), str(ours), "--", *FLAGS[kind].split(), "--data-cache-path", "cache"],
        script.parent,
    )
    found = losses_in([text], PATTERN[kind])
    if code or len(found.get(str(ours), [])) == 0:
        return f"fails:\n{text[-3000:]}"
    theirs, expected = found[str(script)], found[str(ours)]
    close = len(theirs) == len(expected) and all(
        abs(one - other) <= TOLERANCE[kind] for one, other in zip(theirs, expected, strict=True)
    )
    return "" if close else f"prints {theirs}, and ours {expected}"


def run_loop(script: Path) -> str:
    """Returns what is wrong with the simple loop's run on two GPUs, or nothing."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    code, text = run(words, script.parent)
    return f"fails:\n{text[-3000:]}" if code else ""


def main() -> int:
    """Runs the scripts. Returns 1 if one differs, 2 if there are none."""
    given = os.environ.get("MEGATRON_LM", "")
    here = [*Path(given).glob("pretrain_*.py")] if given else []
    names = [f"pretrain_{kind}.py" for kind in FLAGS]
    if not {path.name for path in here} & {*names}:
        print(f"MEGATRON_LM={given or 'FOLDER'}: give the folder of a checkout of Megatron-LM with {', '.join(names)}")
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in Path(given).glob("*.py"):
            shutil.copy(path, folder)
        for kind in FLAGS:
            script = folder / f"pretrain_{kind}.py"
            if script.exists():
                wrong += report(script.name, compare(kind, script), "the losses of ours")
        loop = Path(given) / LOOP
        if loop.exists() and torch.cuda.device_count() < 2:
            print(f"{loop.name}: not run, it needs two GPUs")
        elif loop.exists():
            wrong += report(loop.name, run_loop(Path(shutil.copy(loop, folder))), "runs to its end")
    return min(wrong, 1)


def report(name: str, problem: str, good: str) -> int:
    """Prints a line about a script. Returns the number of problems."""
    print(f"{name}: {problem or good}", flush=True)
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
