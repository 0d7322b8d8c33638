"""Before a run ends because of a non-finite loss or gradient: writes the step, and finds the layer.

The optimizer changes nothing after such a step, so weights and optimizer state are those before it, and the
micro-batches of the last steps are kept. `dump_and_search` writes both, computes the step again with a check of every
module, and writes what it found:

    DUMP/iteration_0000123/          number of the bad step
        iter_0000122/                a checkpoint: the state before the step
        batch_dp_00000.safetensors   micro-batches of each data parallel rank
        report.json                  findings of all ranks, sample ids, sizes

`tools/replay.py` computes the step again in one process.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.exceptions import UserError
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils.files import open_regular_file, parse_json
from megatron.core.utils.json_schema import ListOf, MapOf, OneOf, Plain, Record
from megatron.training.data.batch import Batch
from megatron.training.data.masked_data import BertBatch, T5Batch
from megatron.training.data.recent_steps import RecentStep, fields_of
from megatron.training.data.splits import step_data
from megatron.training.hooks.exit import ExitDecision, ExitReason
from megatron.training.log.non_finite_search import Finding, NonFiniteSearch, in_order
from megatron.training.loop import StepSizes, arguments_of_schedule
from megatron.training.trainer import Trainer

REPORT = "report.json"
_KINDS: dict[str, Any] = {"dict": dict, "Batch": Batch, "BertBatch": BertBatch, "T5Batch": T5Batch}
_BATCHES = ListOf(Record({"kind": OneOf(tuple(_KINDS)), "plain": MapOf(Plain())}))
_SHOWN = 8
"""Findings that are printed; the report has all."""


@dataclass(frozen=True)
class SearchResult:
    """The findings of the second computation of a step on this rank."""

    findings: list[Finding]
    losses: list[dict[str, float]]
    """Mean loss of each micro-batch, by name; empty on ranks that compute none."""


def dump_and_search(trainer: Trainer, decision: ExitDecision) -> None:
    """Writes the step that made the run end, computes it again, and prints which module had the first non-finite value.
    Does nothing unless `decision` is to end because of a non-finite value. All ranks call it."""
    if decision.reason is not ExitReason.NON_FINITE:
        return
    ranks = RankCoordinator(trainer.exit.group)
    step, why_not = _bad_step(trainer, ranks)
    if step is None:
        return _say(trainer, f"the step is neither written nor computed again: {why_not}")
    folder = _write_step(trainer, step, ranks)
    result = search_step(trainer, step)
    found = [Finding.from_json(each) for of_rank in ranks.gather(_json(result.findings)) for each in of_rank]
    found = in_order(found)
    _say(trainer, *lines_of(found, step.iteration))
    for first in found[:1]:
        trainer.log.event("non-finite-search", step.iteration, first=str(first))
    if folder is not None:
        _write_report(trainer, folder, step, found)


def lines_of(found: Sequence[Finding], iteration: int) -> list[str]:
    """Returns the lines to print about the findings of all ranks in a step."""
    if not found:
        return [
            f"iteration {iteration} was computed again, and everything was finite: these weights and this batch do not "
            "explain the first result (suspect the hardware, a race, or a script that is not deterministic)"
        ]
    lines = [f"iteration {iteration} was computed again; first non-finite: {found[0]}"]
    lines += [f"  then {finding}" for finding in found[1:_SHOWN]]
    return lines + ([f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])


def search_step(trainer: Trainer, step: RecentStep) -> SearchResult:
    """Computes forward and backward of a step with the current weights, and checks every module. Changes only
    gradients. All ranks call it."""
    source = trainer.splits.train.micro_batches
    kept = None if source is None else iter(step.batches)
    data = step_data(trainer.config, trainer.environment, kept, regroups=trainer.splits.train.regroups)
    data.begin(step.before.iteration)
    trainer.batches.update(step.before.consumed_train_samples)
    for chunk in trainer.model:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    forward_backward: Any = get_forward_backward_func(trainer.environment.groups.size("pp"), len(trainer.model))
    batches = trainer.batches
    sizes = StepSizes.of_run(trainer.config, data.count(batches.num_microbatches), batches.global_batch_size)
    with NonFiniteSearch(trainer.model, trainer.environment.rank) as search:
        reports = forward_backward(
            forward_step_func=search.watch(trainer.forward_step),
            data_iterator=data.iterators(len(trainer.model)),
            model=list(trainer.model),
            forward_only=False,
            **sizes.for_schedule(),
            **arguments_of_schedule(trainer.optimizer, data),
        )
        search.see_gradients()
    losses = [{name: _mean(value) for name, value in report.items()} for report in reports]
    return SearchResult(search.findings(data.sample_ids), losses)


def _bad_step(trainer: Trainer, ranks: RankCoordinator) -> tuple[RecentStep | None, str]:
    """Returns the step with the first non-finite value of any rank; None and the reason if it cannot be repeated."""
    known = [number for number in ranks.gather(trainer.log.first_non_finite) if number is not None]
    recent = trainer.splits.train.recent
    if not known or recent is None:
        return None, "no rank knows its iteration"
    iteration = min(known)
    step = recent.find(iteration)
    if not all(ranks.gather(step is not None)):
        return None, f"the batch of iteration {iteration} is no longer kept"
    if iteration != trainer.state.iteration and not isinstance(trainer.optimizer, FlatOptimizer):
        return None, "the script's own optimizer has changed the weights since"
    return step, ""


def _write_step(trainer: Trainer, step: RecentStep, ranks: RankCoordinator) -> Path | None:
    """Writes the state before the step, and its micro-batches. Returns the folder; None if nothing was written."""
    root = trainer.config.resilience.nonfinite_dump_dir
    if root is None:
        _say(trainer, "the step is not written: neither --save nor --nonfinite-dump-dir is given")
        return None
    if trainer.splits.train.regroups:
        _say(trainer, "the step is not written: with --hybrid-context-parallel, one process cannot compute it again")
        return None
    folder = Path(root) / f"iteration_{step.iteration:07d}"
    try:
        trainer.finish_save()
        trainer.checkpoints.save_copy(folder, dataclasses.replace(trainer.saved_parts, state=step.before))
    except UserError as error:  # the same on all ranks
        _say(trainer, f"WARNING: the step is not written: {error}")
        return None
    problems = {problem for problem in ranks.gather(_write_batches(trainer, folder, step)) if problem}
    _say(trainer, *(f"WARNING: the batch is not written: {problem}" for problem in sorted(problems)))
    return folder


def _write_report(trainer: Trainer, folder: Path, step: RecentStep, found: Sequence[Finding]) -> None:
    facts = {
        "iteration": step.iteration,
        "micro_batch_size": trainer.config.training.micro_batch_size,
        "data_parallel_size": trainer.environment.groups.size("dp"),
        "findings": _json(found),
    }
    try:
        if trainer.environment.rank == 0:
            (folder / REPORT).write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        print(f"WARNING: {folder / REPORT} is not written: {error}", flush=True)
    _say(trainer, f"the step is in {folder}; to compute it again in one process: python tools/replay.py {folder}")


# Batches in files ----------------------------------------------------------------------------------------------------


def _write_batches(trainer: Trainer, folder: Path, step: RecentStep) -> str | None:
    """Writes the micro-batches of one data parallel rank, on one of the ranks that have them. Returns a problem."""
    groups = trainer.environment.groups
    if any(groups.rank(axis) for axis in ("tp", "cp", "pp")):
        return None
    try:
        write_batches(folder / f"batch_dp_{groups.rank('dp'):05d}.safetensors", step.batches)
    except (OSError, UserError) as error:
        return str(error)
    return None


def write_batches(path: Path, batches: Sequence[object]) -> None:
    """Writes micro-batches as a safetensors file. Raises UserError unless the batches are those of our data sets, or
    dictionaries of tensors."""
    tensors: dict[str, Tensor] = {}
    described = []
    for number, batch in enumerate(batches):
        kind = "dict" if isinstance(batch, Mapping) else type(batch).__name__
        if kind not in _KINDS:
            raise UserError(f"the batches are of type {type(batch).__name__}; dictionaries of tensors can be written")
        items = batch if isinstance(batch, Mapping) else vars(batch)
        found = fields_of(batch)
        plain = {name: value for name, value in items.items() if name not in found}
        odd = sorted(name for name, value in plain.items() if not isinstance(value, int | float | str | None))
        if odd:
            raise UserError(f"the entry {odd[0]!r} of the batches is no tensor, number or string")
        described.append({"kind": kind, "plain": plain})
        tensors |= {f"{number}|{name}": value.detach().cpu().contiguous().clone() for name, value in found.items()}
    save_file(tensors, path, metadata={"batches": json.dumps(described)})


def read_batches(path: Path) -> list[Any]:
    """Returns the micro-batches that `write_batches` wrote. Raises OSError if the file cannot be read, ValueError if it
    contains something else."""
    open_regular_file(path).close()
    try:
        with safe_open(path, framework="pt") as file:
            described = parse_json((file.metadata() or {})["batches"])
            problem = _BATCHES.problem(described, "batches")
            if problem is not None:
                raise ValueError(problem)
            fields: list[dict[str, Any]] = [dict(each["plain"]) for each in described]
            for key in file.keys():  # noqa: SIM118  (not a dictionary)
                number, _, name = key.partition("|")
                fields[int(number)][name] = file.get_tensor(key)
        return [_KINDS[each["kind"]](**values) for each, values in zip(described, fields, strict=True)]
    except (IndexError, KeyError, SafetensorError, TypeError) as error:
        raise ValueError(f"not the micro-batches of a step ({error!r})") from error


def _json(findings: Sequence[Finding]) -> list[dict[str, object]]:
    return [dataclasses.asdict(finding) for finding in findings]


def _mean(value: Tensor) -> float:
    flat = value.detach().reshape(-1).double()
    total, count = (flat[0], flat[1]) if flat.numel() == 2 else (flat[0], torch.ones(()))
    return float(total / count) if float(count) else float(total)


def _say(trainer: Trainer, *sentences: str) -> None:
    if trainer.environment.logs and sentences:
        print("\n".join(sentences), flush=True)
