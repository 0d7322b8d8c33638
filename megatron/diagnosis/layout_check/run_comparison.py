"""Compares the files of two runs: the metrics of their steps, and their checkpoints, tensor by tensor.

A run is given as a folder of --save, as one checkpoint in it, as the dump of a non-finite step, or as a file with a
command line. `bisect_checkpoints` finds the first pair of checkpoints that differs.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.checkpoint import Checkpoint, check_files, open_checkpoint
from megatron.core.dist_checkpointing.chunk import Chunk, is_optimizer_state
from megatron.core.dist_checkpointing.manifest import MANIFEST, BrokenCheckpoint
from megatron.core.dist_checkpointing.planning import match
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
from megatron.training.checkpoint_checks import command_line_in, ranks_of_checkpoint
from megatron.training.config.command_line import kept_words, split_words
from megatron.training.config.recorded_flags import check_spec, recorded_flags
from megatron.training.launch.launcher_variables import processes_of
from megatron.training.log.jsonl import MetricsHistory

_COMPARED = ("lm loss", "grad norm", "params norm", "learning rate", "loss scale", "global batch size")
"""Values of a step that are compared first; all other losses follow."""
_DROPPED_GROUPS = {"checkpoints", "logging", "evaluation", "faults and signals"}
_DROPPED = {"exit_interval", "exit_duration_in_mins", "dry_run", "print_config", "config_file"}
"""Flags that say where a run writes, or when it ends."""


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs."""

    name: str
    """The path as it was given."""
    root: Path | None = None
    """Folder of its checkpoints; None for a command line."""
    checkpoints: dict[int, Path] = field(default_factory=dict)
    """Checkpoints by iteration, in their order."""
    metrics: Path | None = None
    words: tuple[str, ...] = ()
    """Words of its command line, if it was given as a file."""


def open_run(path: Path) -> ComparedRun:
    """Returns the run that a folder or file describes. Raises UserError for other folders and files."""
    if path.is_file():
        try:
            words = shlex.split(path.read_text().replace("\\\n", " "), comments=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as the words of a command line: {error}") from error
        if not any(word.startswith("--") for word in words):
            raise UserError(f"{path}: there is no flag in it; a file must contain the command line of a run")
        return ComparedRun(str(path), words=tuple(words))
    if not path.is_dir():
        raise UserError(f"{path}: no such folder or file")
    if (path / MANIFEST).is_file():
        iteration = open_checkpoint(path).manifest.iteration
        return ComparedRun(str(path), path.parent, {iteration: path})
    found = {f.step: f.path for f in folders.candidates(path) if isinstance(f.step, int)}
    metrics = path / "metrics.jsonl"
    if not found and not metrics.is_file():
        raise UserError(f"{path}: neither checkpoints nor metrics.jsonl in this folder")
    return ComparedRun(str(path), path, dict(sorted(found.items())), metrics if metrics.is_file() else None)


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


@dataclass(frozen=True)
class MetricsDifference:
    """The first step whose values differ."""

    iteration: int
    key: str
    values: tuple[float | None, float | None]


def first_metrics_difference(a: MetricsHistory, b: MetricsHistory, tolerance: float) -> MetricsDifference | None:
    """Returns the first common iteration with a value that differs by more than `tolerance`, relative to the larger of
    the two values; None if no value does."""
    other = {line["iteration"]: line for line in b.training}
    for line in a.training:
        match_of = other.get(line["iteration"])
        if match_of is None:
            continue
        keys = [*_COMPARED, *(key for key in line if key.endswith("loss") and key not in _COMPARED)]
        for key in keys:
            if (key in line or key in match_of) and not _close(line.get(key), match_of.get(key), tolerance):
                return MetricsDifference(line["iteration"], key, (line.get(key), match_of.get(key)))
    return None


def _close(x: object, y: object, tolerance: float) -> bool:
    if not isinstance(x, int | float) or not isinstance(y, int | float):
        return bool(x == y)
    return x == y or abs(x - y) <= tolerance * max(abs(x), abs(y))


def common_iterations(a: MetricsHistory, b: MetricsHistory) -> list[int]:
    """Returns the iterations that both histories have."""
    return sorted({line["iteration"] for line in a.training} & {line["iteration"] for line in b.training})


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two checkpoints."""

    name: str
    error: float
    """Largest difference over the largest value; infinite where the tensor is missing or has another shape."""
    where: str
    """The element that differs most, or what is missing."""
    ranks: tuple[list[int], list[int]] = ([], [])
    """Ranks of each run that wrote this element."""


def compare_checkpoints(a: Checkpoint, b: Checkpoint, tolerance: float) -> Iterator[TensorDifference]:
    """Yields the tensors that differ by more than `tolerance` of their largest value: weights in the order of the
    model, then the optimizer's state. Reads one tensor at a time."""
    names = dict.fromkeys([*a.catalogue, *b.catalogue])
    for name in sorted(names, key=_place_in_model):
        stored = [checkpoint.catalogue.get(name) for checkpoint in (a, b)]
        shapes = [None if found is None else found[0].chunk.global_shape for found in stored]
        if shapes[0] != shapes[1]:
            both = [f"has shape {[*shape]}" if shape is not None else "is missing" for shape in shapes]
            yield TensorDifference(name, float("inf"), f"{both[0]} in the first run and {both[1]} in the second")
            continue
        difference = _compare(name, a, b, tolerance)
        if difference is not None:
            yield difference


_PARTS = ("embedding", "layers", "final", "output")
_IN_LAYER = ("input_layernorm", "attention", "pre_mlp_layernorm", "mlp")


def _place_in_model(name: str) -> tuple[object, ...]:
    """Returns a key that sorts names of tensors in the order in which a model uses them."""
    layer = re.search(r"layers\.(\d+)\.", name)
    part = next((number for number, part in enumerate(_PARTS) if part in name), len(_PARTS))
    within = next((number for number, part in enumerate(_IN_LAYER) if part in name), 0)
    return is_optimizer_state(name), part, int(layer[1]) if layer else 0, within, name


def _compare(name: str, a: Checkpoint, b: Checkpoint, tolerance: float) -> TensorDifference | None:
    x, y = read_whole(a, name), read_whole(b, name)
    if torch.equal(x, y):
        return None
    x, y = x.double(), y.double()
    apart, largest = (x - y).abs(), float(torch.maximum(x.abs(), y.abs()).max())
    apart = torch.where(x.isfinite() & y.isfinite() | (x == y), apart.nan_to_num(0.0), torch.inf)
    place, error = int(apart.argmax()), float(apart.max()) / largest if largest else 0.0
    if apart.max().isinf():
        error = float("inf")
    if error <= tolerance:
        return None
    shape = a.catalogue[name][0].chunk.global_shape
    index = [int(number) for number in torch.unravel_index(torch.tensor(place), shape)] if shape else []
    text = f"element {index}: {float(x[place]):.9g} and {float(y[place]):.9g}; {int((apart > 0).sum())} of {x.numel()}"
    return TensorDifference(name, error, text, (_ranks_with(a, name, index), _ranks_with(b, name, index)))


def read_whole(checkpoint: Checkpoint, name: str) -> Tensor:
    """Reads a whole tensor, one-dimensional."""
    chunk = checkpoint.catalogue[name][0].chunk
    values = torch.zeros(max(1, torch.Size(chunk.global_shape).numel()), dtype=chunk.dtype)
    whole = Chunk(name, chunk.global_shape, Box.whole(chunk.global_shape), None, values)
    fill_tensors(checkpoint, match([whole], {name: checkpoint.catalogue[name]}))
    return values


def _ranks_with(checkpoint: Checkpoint, name: str, index: Sequence[int]) -> list[int]:
    """Returns the ranks whose files have an element."""
    found = []
    for located in checkpoint.catalogue[name]:
        box, (begin, end) = located.chunk.box, located.chunk.range
        inside = [number - start for number, start in zip(index, box.start, strict=True)]
        if not all(0 <= number < size for number, size in zip(inside, box.shape, strict=True)):
            continue
        place = 0
        for number, size in zip(inside, box.shape, strict=True):
            place = place * size + number
        if begin <= place < end:
            found.append(int("".join(filter(str.isdigit, Path(located.data_file).stem)) or 0))
    return found


@dataclass(frozen=True)
class CheckpointDifference:
    """The first common checkpoints that differ."""

    last_equal: int | None
    """Iteration of the newest common checkpoint before them, which is equal; None if there is none."""
    iteration: int
    tensors: list[TensorDifference]


def bisect_checkpoints(a: ComparedRun, b: ComparedRun, tolerance: float) -> CheckpointDifference | None:
    """Returns the first common checkpoints that differ; None if the newest common ones are equal. Bisects, because runs
    that differ once differ from then on. Raises UserError if the runs have no common iteration, or if a checkpoint is
    broken."""
    if len(a.checkpoints) == len(b.checkpoints) == 1:
        (iteration, path), (_, other) = *a.checkpoints.items(), *b.checkpoints.items()
        tensors = list(compare_checkpoints(_open(path), _open(other), tolerance))
        return CheckpointDifference(None, iteration, tensors) if tensors else None
    common = sorted(a.checkpoints.keys() & b.checkpoints.keys())
    if not common:
        have = [", ".join(map(str, run.checkpoints)) or "none" for run in (a, b)]
        raise UserError(f"{a.name} and {b.name} have no checkpoint of the same iteration: {have[0]}; {have[1]}")
    low, high, worst = 0, len(common), list[TensorDifference]()
    while low < high:
        middle = (low + high) // 2 if worst else high - 1  # the newest first: if it is equal, all are
        first, second = (_open(run.checkpoints[common[middle]]) for run in (a, b))
        found = list(compare_checkpoints(first, second, tolerance))
        if found:
            high, worst = middle, found
        else:
            low = middle + 1
    return CheckpointDifference(common[low - 1] if low else None, common[high], worst) if worst else None


def _open(path: Path) -> Checkpoint:
    try:
        checkpoint = open_checkpoint(path)
        check_files(checkpoint)
    except BrokenCheckpoint as error:
        raise UserError(f"checkpoint {path} is broken: {error}") from error
    return checkpoint


# ---------------------------------------------------------------------------------------------------------------------
# Running again


@dataclass(frozen=True)
class Rerun:
    """How to compute a run again."""

    words: list[str]
    world_size: int


def rerun_of(run: ComparedRun, iteration: int | None, flags: Sequence[str] = ()) -> Rerun:
    """Returns the flags and the number of processes to compute a run again, from the checkpoint of `iteration` or, for
    None, from the start. Leaves out flags of checkpoints, logs and evaluation. Raises UserError if the folder has no
    checkpoint, or if the run's layers are code (--spec) that `flags`, which the user adds, do not name."""
    if run.root is None:
        words, ranks = _without_launcher(run.words)
        return Rerun(_kept(words), ranks)
    if not run.checkpoints:
        raise UserError(f"{run.name}: without a checkpoint its flags are not known; give a file with the command line")
    checkpoint = open_checkpoint(run.checkpoints[max(run.checkpoints) if iteration is None else iteration])
    recorded = command_line_in(checkpoint.folder, checkpoint.manifest)
    check_spec(recorded, given="--spec" in flags)
    taken = recorded_flags(recorded, lambda flag: flag.from_checkpoint)
    words = _kept([word for _, occurrence in taken for word in occurrence.as_words()])
    if iteration is not None:
        words += ["--load", str(run.root), "--ckpt-step", str(iteration)]
    return Rerun(words, ranks_of_checkpoint(checkpoint))


def _without_launcher(words: Sequence[str]) -> tuple[list[str], int]:
    """Returns the flags behind the script of a command line, and the number of processes that torchrun starts."""
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        return list(words), 1
    return list(words[script + 1 :]), processes_of(words[:script])


def _kept(words: Sequence[str]) -> list[str]:
    occurrences, strays = split_words(words)
    kept = kept_words(
        occurrences, lambda flag: flag is None or not (flag.group in _DROPPED_GROUPS or flag.field in _DROPPED)
    )
    return [*strays, *kept, "--eval-iters", "0", "--log-interval", "1000000"]
