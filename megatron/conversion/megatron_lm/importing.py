"""Import of Megatron-LM's checkpoints: a run that Megatron-LM began continues here, at the same sample.

Files are read as inert data (`inert_pickle`), tensor by tensor. The result is an ordinary checkpoint, for any layout.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.conversion.importing import write_flags
from megatron.conversion.megatron_lm.arguments import attributes, flags_of_arguments
from megatron.conversion.megatron_lm.inert_pickle import shown
from megatron.conversion.megatron_lm.legacy_layout import FILE, ModelLayout, TensorsOf
from megatron.conversion.megatron_lm.legacy_source import LegacySource
from megatron.conversion.megatron_lm.names import Found, SourceTensor
from megatron.conversion.megatron_lm.plain_folder import PlainSource, is_plain
from megatron.conversion.megatron_lm.source import DistSource, Source, numbers_called
from megatron.conversion.megatron_lm.torch_dist import METADATA, DistFolder
from megatron.conversion.model import BuildModel, RankTensor, canonical_shapes, tensors_of_rank
from megatron.core.dist_checkpointing.checkpoint_selection import Log
from megatron.core.dist_checkpointing.chunk import MASTER, Chunk, is_optimizer_state, optimizer_state_name
from megatron.core.dist_checkpointing.folders import RELEASE, TRACKER, Step, folder_name, list_folders, read_tracker
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.dist_checkpointing.planning import describe_names
from megatron.core.dist_checkpointing.writing import SaveResult, save_streamed
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
from megatron.core.schedule.optimizer_param_scheduler import STATE_NAMES
from megatron.data.tokenizer.build import build_tokenizer
from megatron.training.arguments import configure
from megatron.training.config.command_line import read_command_line, split_words
from megatron.training.config.flag_table import flags_by_spelling
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.run_description import describe_run
from megatron.training.state import TrainState
from megatron.training.trained_model import config_for_one_process

_HALF = {"--bf16": torch.bfloat16, "--fp16": torch.float16}
_SCALER = ("scale", "growth_tracker", "hysteresis_tracker")


@dataclass(frozen=True)
class ImportedRun:
    """Result of an import."""

    saved: SaveResult
    flags: list[str]
    """Words of a command line that describe the run."""
    state: TrainState | None
    """Counts with which training continues; None for weights without a run."""


def import_run(
    source: Path,
    root: Path,
    build_model: BuildModel,
    *,
    step: Step | None = None,
    flags: Sequence[str] = (),
    with_optimizer: bool = True,
    file_bytes: int = 4 << 30,
    log: Log = print,
) -> ImportedRun:
    """Converts a checkpoint of Megatron-LM under `source` into one of this project under `root`, of the same iteration.

    It is the checkpoint that their tracker file names, or that of `step`. The flags of the model are those in the
    checkpoint, followed by `flags` (words of a command line), which replace them. Weights keep their type; main weights
    and moments come along unless `with_optimizer` is False. Iteration, samples, schedule and loss scale are those of
    the run.

    Raises UserError, before anything is written, for a damaged or hostile file, for tensors that are missing, left over
    or of another shape, by name.
    """
    mine = [found.path.name for found in list_folders(root)] if root.exists() else []
    if mine:
        raise UserError(f"{root} holds checkpoints ({max(mine)}); name another folder to import into")
    folder, step = find_folder(source, step)
    words: list[str] = []
    vocab_size = 0

    def tensors_of(layout: ModelLayout, rank: int) -> list[list[RankTensor]]:
        return tensors_of_rank(_config_of_layout(words, layout), build_model, vocab_size, rank)

    checkpoint = open_source(folder, tensors_of)
    common = checkpoint.common()
    config, words = _config(common, flags, folder)
    vocab_size = config.tokenizer.model_vocab_size(build_tokenizer(config.tokenizer).vocab_size)
    shapes = canonical_shapes(config, build_model, vocab_size)
    found = checkpoint.find(shapes, with_optimizer)
    state, facts = _state(common, config, found, step, log)
    _split_masters(found, words)
    _drop_equal_masters(found, folder)
    for note in found.notes:
        log(note)
    if found.dropped:
        log(f"left behind, {len(found.dropped)} entries that nothing here reads: {describe_names(found.dropped, 4)}")
    saved = save_streamed(
        root,
        _files(found, shapes, file_bytes),
        lambda chunk: _values(found.tensors[chunk.name], chunk, folder),
        step=step,
        common=facts,
        config=describe_run(config) | {"command_line": words},
    )
    write_flags(root, words)
    return ImportedRun(saved, words, state)


def find_folder(source: Path, step: Step | None) -> tuple[Path, Step]:
    """Returns the folder and the step of the checkpoint under `source` that the tracker names, or of `step`."""
    own = re.fullmatch(r"iter_(\d+)|release", source.name)
    if own is not None and not (source / TRACKER).exists():
        return source, int(own[1]) if own[1] else RELEASE
    if step is None:
        tracker = read_tracker(source)
        if tracker.step is None:
            problem = tracker.problem or f"no {TRACKER}"
            raise UserError(f"{source}: {problem}; name the folder above iter_NNNNNNN, or give --ckpt-step")
        step = tracker.step
    folder = source / folder_name(step)
    if not folder.is_dir():
        raise UserError(f"{source} has no {folder.name}")
    return folder, step


def open_source(folder: Path, tensors_of: TensorsOf) -> Source:
    """Returns the checkpoint in a folder. `tensors_of` describes the tensors of a rank, which formats need that hold
    state dicts of modules.

    Raises UserError if it is in none of the formats torch_dist, torch_dcp, fsdp_dtensor and torch (the legacy one)."""
    if (folder / MANIFEST).exists():
        raise UserError(f"{folder} is a checkpoint of this program already; load it as it is")
    if (folder / METADATA).exists():
        stored = DistFolder(folder)
        return PlainSource(stored, tensors_of) if is_plain(stored) else DistSource(stored)
    if any(folder.glob(f"mp_rank_*/{FILE}")):
        return LegacySource(folder, tensors_of)
    raise UserError(f"{folder} has no {METADATA} and no mp_rank_*/{FILE}: it is in none of the known formats")


# ---------------------------------------------------------------------------------------------------------------------
# Flags and state


def _config(common: Mapping[object, object], flags: Sequence[str], folder: Path) -> tuple[PretrainConfig, list[str]]:
    """Returns the settings of the run for one process, and the words that give them."""
    given = flags_of_arguments(common.get("args"))
    problems = read_command_line(flags).problems
    indirect = [one.spelling for one in split_words(flags)[0] if one.spelling in ("--config", "--recipe")]
    problems += [f"{spelling}: give the flags themselves" for spelling in indirect]
    if problems:
        raise UserError("\n".join(f"after --: {problem}" for problem in problems))
    words = _replaced(given, flags)
    if not attributes(common.get("args")) and not flags:
        raise UserError(f"{folder} holds no arguments of its run: give the flags of the model behind --")
    described = {"command_line": words, "model_family": "gpt"}
    return config_for_one_process(described, ["--micro-batch-size", "1"], has_cuda=False), words


def _config_of_layout(words: Sequence[str], layout: ModelLayout) -> PretrainConfig:
    """Returns the settings of the run in the smallest world of a layout."""
    more = ["--tensor-model-parallel-size", layout.tensor, "--pipeline-model-parallel-size", layout.pipeline]
    more += ["--expert-model-parallel-size", layout.expert] if layout.expert > 1 else []
    more += ["--sequence-parallel"] if layout.tensor > 1 else []
    more += ["--num-virtual-stages-per-pipeline-rank", layout.chunks] if layout.chunks > 1 else []
    more += ["--micro-batch-size", 1, "--global-batch-size", layout.world_size, "--dry-run"]
    launch = LaunchEnvironment(layout.world_size, False)
    return configure(
        _replaced(words, [str(word) for word in more]), None, {"model_family": "gpt"}, launch_environment=launch
    )


def _replaced(words: Sequence[str], by: Sequence[str]) -> list[str]:
    """Returns words of a command line without flags that `by` gives too, followed by `by`."""
    table = flags_by_spelling()

    def field_of(spelling: str) -> str:
        return table[spelling].field if spelling in table else spelling

    taken = {field_of(occurrence.spelling) for occurrence in split_words(by)[0]}
    kept = [one for one in split_words(words)[0] if field_of(one.spelling) not in taken]
    return [*(word for one in kept for word in one.as_words()), *by]


def _state(
    common: Mapping[Any, Any], config: PretrainConfig, found: Found, step: Step, log: Log
) -> tuple[TrainState | None, dict[str, Any]]:
    """Returns the counts of the run, and the part of the checkpoint that is no tensor."""
    if step == RELEASE:
        found.tensors = {name: tensor for name, tensor in found.tensors.items() if not is_optimizer_state(name)}
        return None, {}
    iteration = common.get("iteration", step)
    if iteration != step:
        raise UserError(f"its folder says iteration {step}, its content {shown(iteration)}")
    given = attributes(common.get("args"))
    samples = _count(given, "consumed_train_samples")
    if samples is None:
        batch = config.training.global_batch_size or 1
        samples = step * batch
        log(f"no count of samples in the checkpoint: {step} iterations of {batch} (--global-batch-size) are {samples}")
    state = TrainState(
        iteration=step,
        consumed_train_samples=samples,
        skipped_train_samples=_count(given, "skipped_train_samples") or 0,
        consumed_valid_samples=_count(given, "consumed_valid_samples") or 0,
        consumed_tokens=samples * (config.data.seq_length or 0),
        floating_point_operations_so_far=float(_number(common.get("num_floating_point_operations_so_far"))),
    )
    schedule = common.get("opt_param_scheduler")
    schedule = {key: schedule[key] for key in STATE_NAMES if key in schedule} if isinstance(schedule, dict) else {}
    for key, value in schedule.items():
        if value is not None and not isinstance(value, str | int | float):
            raise UserError(f"opt_param_scheduler: {key} is a {type(value).__name__}")
    schedule.setdefault("num_steps", samples)
    optimizer = _optimizer_state(common.get("optimizer"), step, log) if _has_moments(found) else None
    if optimizer is None:
        found.tensors = {name: tensor for name, tensor in found.tensors.items() if not is_optimizer_state(name)}
        log("no moments in the checkpoint: resume with --no-load-optim")
    return state, {"train_state": state.to_json(), "scheduler": schedule, "optimizer": optimizer}


def _has_moments(found: Found) -> bool:
    return any(name.startswith(optimizer_state_name("exp_avg", "")) for name in found.tensors)


def _optimizer_state(saved: object, step: int, log: Log) -> dict[str, object]:
    steps = {int(number) for number in numbers_called(saved, ("step", "common_step"))}
    if len(steps) > 1:
        raise UserError(f"the optimizer's parameter groups have made different numbers of steps: {sorted(steps)}")
    if not steps:
        log(f"no count of updates in the checkpoint: {step}, that of iterations, is taken")
    scaler = {name: next(numbers_called(saved, (name,)), None) for name in _SCALER}
    known = {"scale": scaler["scale"], **{key: int(scaler[key] or 0) for key in _SCALER[1:]}}
    return {"update_count": steps.pop() if steps else step, "grad_scaler": known if scaler["scale"] else None}


def _count(given: Mapping[str, object], name: str) -> int | None:
    value = given.get(name)
    return value if isinstance(value, int) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def _split_masters(found: Found, words: Sequence[str]) -> None:
    """Takes a run's main weights from its weights where these have more bits than the run's, as in fsdp_dtensor."""
    dtype = next((dtype for flag, dtype in _HALF.items() if flag in words), None)
    for name, tensor in list(found.tensors.items()):
        master = optimizer_state_name(MASTER, name)
        has_moments = optimizer_state_name("exp_avg", name) in found.tensors
        if dtype is not None and has_moments and tensor.dtype == torch.float32 and master not in found.tensors:
            found.tensors[name] = SourceTensor(dtype, partial(_rounded, tensor, dtype))
            found.tensors[master] = tensor


def _rounded(tensor: SourceTensor, dtype: torch.dtype) -> Tensor:
    return tensor.read().to(dtype)


def _drop_equal_masters(found: Found, folder: Path) -> None:
    """Leaves out main weights whose weights are stored in the same type. The two are compared when the weight is
    written; a run of that type has no main weights of its own."""
    masters = optimizer_state_name(MASTER, "")
    for name in [name for name in found.tensors if name.startswith(masters)]:
        weight, master = found.tensors.get(name.removeprefix(masters)), found.tensors[name]
        if weight is not None and weight.dtype == master.dtype:
            del found.tensors[name]
            both = partial(_equal, weight, master, f"{folder}: {name.removeprefix(masters)}")
            found.tensors[name.removeprefix(masters)] = SourceTensor(weight.dtype, both)


def _equal(weight: SourceTensor, master: SourceTensor, name: str) -> Tensor:
    values = weight.read()
    if not torch.equal(values, master.read()):
        raise UserError(f"{name} and its main weight have the same type and other values")
    return values


def _files(found: Found, shapes: Mapping[str, Sequence[int]], file_bytes: int) -> Iterator[list[Chunk]]:
    """Yields the chunks of each file, without memory."""
    file: list[Chunk] = []
    held = 0
    for name, tensor in found.tensors.items():
        shape = tuple(shapes[_weight_of(name)])
        values = torch.empty(shape, dtype=tensor.dtype, device="meta")
        nbytes = values.numel() * values.itemsize
        if file and held + nbytes > file_bytes:
            yield file
            file, held = [], 0
        file.append(Chunk(name, shape, Box.whole(shape), None, values))
        held += nbytes
    yield file


def _weight_of(name: str) -> str:
    return name.split(".", 2)[2] if is_optimizer_state(name) else name


def _values(tensor: SourceTensor, chunk: Chunk, folder: Path) -> Tensor:
    values = tensor.read()
    if values.numel() != chunk.tensor.numel():
        raise UserError(f"{folder}: {chunk.name} has {values.numel()} elements, {chunk.tensor.numel()} are wanted")
    return values
