"""Each field of each JSON file of a checkpoint, changed on purpose: it loads, or one sentence names the file."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_run import PRECISIONS, SmallRun

from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.exceptions import UserError
from megatron.training.checkpoint_checks import check_before_build
from megatron.training.loss_spikes import LossSpikes
from megatron.training.state import SavedParts

INDEX = "rank_00000.json"
Place = tuple[str | int, ...]


DEEP = {f"{depth} levels": depth for depth in (250, 900, 5000)}
"""Words that stand for lists in lists, so many levels deep."""
MISSING = object()
FORGERIES: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "true": True,
    "negative": -1,
    "huge": 10**400,
    "beyond int64": 1 << 63,
    "fraction": 0.5,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "text": "x",
    "half a surrogate pair": "\ud800",
    "NUL": "a\0b",
    "a long name": "n" * 300,
    "list": [1, "x", None],
    "object": {"a": {"b": []}},
    **{word: word for word in DEEP},
}


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def text_of(value: Any) -> bytes:
    text = json.dumps(value)
    for word, depth in DEEP.items():
        text = text.replace(json.dumps(word), "[" * depth + "]" * depth)
    return text.encode()


NAMES = ("in the checkpoint", "the checkpoint of iteration 2")
"""What a message calls the checkpoint if not the file but the run does not fit."""


@dataclasses.dataclass
class Victim:
    """A checkpoint to forge, and the run that loads it."""

    root: Path
    run: SmallRun
    parts: SavedParts
    contents: dict[str, Any]
    """The fields of the JSON files, by name."""

    def write(self, contents: dict[str, Any]) -> None:
        """Writes the JSON files with digests that fit."""
        folder, contents = self.root / "iter_0000002", copied(contents)
        index = text_of(contents[INDEX])
        (folder / INDEX).write_bytes(index)
        fields = contents[MANIFEST] if isinstance(contents[MANIFEST], dict) else {}
        if isinstance(fields.get("indexes"), dict) and isinstance(fields["indexes"].get(INDEX), dict):
            digest = {"size": len(index), "sha256": hashlib.sha256(index).hexdigest()}
            same = {name: digest[name] for name in digest if fields["indexes"][INDEX].get(name) == KEPT}
            fields["indexes"][INDEX] |= same
        text = text_of({**fields, "sha256": "0" * 64})
        (folder / MANIFEST).write_bytes(text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1))

    def load(self) -> str | None:
        """Loads the checkpoint, after the check before the model is built. Returns the error, None if there is none."""
        error = None
        for step in (self.check, lambda: self.run.checkpoints.load(self.parts)):
            try:
                step()
            except UserError as found:
                error = str(found)
                assert any(name in error for name in (str(self.root), *NAMES)), error
                assert "\n" not in error and len(error) < 2000, error
        return error

    def check(self) -> None:
        check_before_build(self.run.checkpoints.config)


KEPT = "as the file is"


@pytest.fixture(scope="module")
def victim(tmp_path_factory) -> Victim:
    root = tmp_path_factory.mktemp("checkpoint")
    schedule = (
        "--lr 0.01 --min-lr 0.001 --lr-warmup-iters 2 --train-iters 20 --weight-decay 0.1 --lr-decay-style cosine"
    )
    flags = f"--save {root} --load {root} --loss-spike-action skip {schedule}"
    run = SmallRun.make(flags, **PRECISIONS["fp16 with a loss scale"])
    spikes = LossSpikes(run.checkpoints.config.resilience, run.checkpoints.groups, torch.device("cpu"))
    run.checkpoints.data, run.checkpoints.data_order = {"/data/text": "abc"}, {"--dataloader-type": "single"}
    parts = dataclasses.replace(run.train(2).parts, spikes=spikes)
    run.checkpoints.save(parts)
    contents = {name: json.loads((root / "iter_0000002" / name).read_bytes()) for name in (MANIFEST, INDEX)}
    common = contents[MANIFEST]["common"]
    common |= {"rewinds": [{"spike": 9, "iteration": 2, "first": 8}], "earlier_run": [7]}
    del common["loss_spikes"]["history"][2:]
    contents[MANIFEST]["indexes"][INDEX] = {"size": KEPT, "sha256": KEPT}
    return Victim(root, run, parts, contents)


def places(value: Any, limit: int = 3) -> Iterator[Place]:
    """Yields the paths of a value's parts; of a list only the first items."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:limit]
    for name, item in items:
        yield (name,)
        if isinstance(item, dict | list):
            yield from ((name, *rest) for rest in places(item, limit))


def forged(contents: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    changed = copied(contents)
    inner: Any = changed
    for name in place[:-1]:
        inner = inner[name]
    if value is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


def test_the_checkpoint_itself_loads(victim):
    victim.write(victim.contents)
    assert victim.load() is None


def forgeable(contents: dict[str, Any]) -> list[Place]:
    return [place for place in places(contents) if len(place) > 1 and place != (MANIFEST, "sha256")]


def test_each_field_once(victim):
    """Another kind of forgery for each field. `load` checks the sentences."""
    kinds = itertools.cycle(FORGERIES)
    refused = 0
    for place in forgeable(victim.contents):
        victim.write(forged(victim.contents, place, FORGERIES[next(kinds)]))
        refused += victim.load() is not None
    assert refused > 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORGERIES)
def test_each_field(victim, kind):
    refused = 0
    for place in forgeable(victim.contents):
        victim.write(forged(victim.contents, place, FORGERIES[kind]))
        refused += victim.load() is not None
    assert refused > 20


@pytest.mark.parametrize("name", [MANIFEST, INDEX])
@pytest.mark.parametrize("value", [[], None, "x", "900 levels"], ids=["list", "null", "text", "deep"])
def test_a_whole_file(victim, name, value):
    victim.write({**victim.contents, name: value})
    assert f"{victim.root}/iter_0000002/{name}" in str(victim.load())


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (
            (MANIFEST, "common", "train_state", "iteration"),
            -3,
            "common.train_state.iteration is -3, not an integer from 0 to",
        ),
        ((MANIFEST, "common", "scheduler"), MISSING, "common.scheduler is missing"),
        (
            (MANIFEST, "common", "optimizer", "grad_scaler", "scale"),
            0.0,
            "common.optimizer.grad_scaler.scale is 0.0, not a",
        ),
        ((MANIFEST, "config", "command_line"), "--lr 1", 'config.command_line is "--lr 1", not a list'),
        ((MANIFEST, "layout", "tp"), 0, "layout.tp is 0, not an integer from 1 to"),
        (
            (MANIFEST, "common", "train_state", "epochs"),
            1,
            "common.train_state holds epochs, which this release does not",
        ),
        (
            (MANIFEST, "common", "scheduler", "num_steps"),
            MISSING,
            "common.scheduler does not fit this run (KeyError('num",
        ),
        ((INDEX, "chunks", 0, "dtype"), "F128", 'chunks[0].dtype is "F128", not one of F64, '),
        ((INDEX, "chunks", 1, "offset"), 1 << 40, " ends at byte 1099511"),
        ((INDEX, "data_file"), "n" * 300, "is not the name of a file in this folder"),
    ],
)
def test_the_key_is_named(victim, place, value, sentence):
    victim.write(forged(victim.contents, place, value))
    error = victim.load()
    assert error is not None and sentence in error and f"{victim.root}/iter_0000002/{place[0]}" in error


def test_keys_of_a_newer_release_are_left_alone(victim):
    changed = copied(victim.contents)
    for record in (changed[MANIFEST], changed[MANIFEST]["common"], changed[MANIFEST]["common"]["optimizer"]):
        record["news"] = {"a": [1]}
    for record in (changed[INDEX], changed[INDEX]["chunks"][0], changed[MANIFEST]["config"]):
        record["news"] = 1
    victim.write(changed)
    assert victim.load() is None
