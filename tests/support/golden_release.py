"""What a release promises to later ones: a checkpoint, the values of its config, and its public API.

    python -m support.golden_release          (in tests/, with the repository on PYTHONPATH)

writes `tests/data/golden_release/VERSION/` for the version of pyproject.toml, once, when the release is made. A folder
that exists is never written again: `tests/test_golden_release.py` checks every one of them.
"""

import contextlib
import importlib
import inspect
import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from support.command_lines import configured
from support.runs import train, write_documents

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/data/golden_release"
LISTS = ("megatron_lm_api", "megatron_lm_script_names", "megatron_lm_script_names_019")
RUN = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --make-vocab-size-divisible-by 8 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --group-query-attention --num-query-groups 1 --disable-bias-linear "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 1 --num-workers 0 "
    "--eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 40 --split 100,0,0 --fp64 --train-iters 6 "
    "--hidden-dropout 0.1 --attention-dropout 0.0"
)
"""A run in float64, so that losses do not depend on the kernels of a machine."""
SAVED = 3
"""Steps before the checkpoint; the run goes on for as many."""
BY_NAME = "*, "


def version() -> str:
    """Returns the version of this tree."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def public_names() -> dict[str, list[str] | None]:
    """Returns the parameters of each public name that has some, by `module:name`: `name`, or `name = default` if the
    default is a plain value, after `*, ` if it is given by name only. None for a name that is not called."""
    found: dict[str, list[str] | None] = {}
    for file in LISTS:
        for entry in json.loads((ROOT / "tests/data" / f"{file}.json").read_text()):
            module, name = entry.get("module"), entry.get("name")
            if module and name and module.startswith("megatron"):
                found[f"{module}:{name}"] = parameters_of(getattr(importlib.import_module(module), name, None))
    return dict(sorted(found.items()))


def parameters_of(thing: Any) -> list[str] | None:
    """Returns the parameters of a function or class, as in `public_names`."""
    if not callable(thing):
        return None
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    return [_text(parameter) for parameter in parameters if parameter.kind not in _ANY]


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _text(parameter: inspect.Parameter) -> str:
    plain = parameter.default is None or isinstance(parameter.default, bool | int | float | str)
    text = f"{parameter.name} = {parameter.default!r}" if plain else parameter.name
    return f"{BY_NAME}{text}" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else text


def values_of(flags: str) -> dict[str, str]:
    """Returns the value of each setting of a command line, as text."""
    values = sorted(configured(flags, base="").flat().items())
    return {name: getattr(value, "__qualname__", str(value)) for name, value in values}


def losses(flags: str) -> list[float]:
    """Returns the loss of each step of a run with these flags."""
    return train(flags, base="").losses


def write(folder: Path) -> None:
    """Writes the folder of a release. Raises FileExistsError if it exists."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):  # no path of this machine is in the checkpoint
        write_documents(Path("documents"), documents=60)
        flags = f"{RUN} --data-path documents --data-cache-path cache"
        run = losses(f"{flags} --save checkpoint --save-interval {SAVED} --exit-interval {SAVED}")
        run += losses(f"{flags} --load checkpoint")
    shutil.rmtree(folder / "cache")
    (folder / "checkpoint/metrics.jsonl").unlink()
    (folder / "run.txt").write_text(f"{RUN}\n")
    record = {"losses": run, "values": values_of(f"{RUN} --mock-data"), "names": public_names()}
    (folder / "release.json").write_text(json.dumps(record, indent=0) + "\n")


if __name__ == "__main__":
    try:
        write(FOLDER / version())
    except FileExistsError:
        sys.exit(f"error: {FOLDER / version()} exists, and a release does not change; raise the version first")
