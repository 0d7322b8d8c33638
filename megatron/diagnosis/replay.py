"""Computes a step again, in one process. The step ended a run, which wrote it to a folder (`non_finite`)."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.dist_checkpointing.folders import folder_name
from megatron.core.dist_checkpointing.manifest import MANIFEST, Manifest
from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json, read_regular_file
from megatron.core.utils.json_schema import Integer, ListOf, Nullable, Record, Text, shown
from megatron.diagnosis.non_finite import REPORT, SearchResult, read_batches, search_step
from megatron.training.arguments import configure
from megatron.training.checkpoint_checks import command_line_in
from megatron.training.config.command_line import ExtraArgsProvider, split_words
from megatron.training.config.flag_table import Flag, flags_by_spelling
from megatron.training.config.recorded_flags import check_spec, flags_of_model
from megatron.training.config.retired import translate_all
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.data.recent_steps import RecentStep
from megatron.training.launch.environment import process_environment
from megatron.training.launch.signals import SignalWatch
from megatron.training.log.non_finite_search import Finding
from megatron.training.providers import Providers
from megatron.training.setup.set_up import set_up
from megatron.training.trainer import Trainer

_GROUPS_LEFT_OUT = {"data parallel", "memory", "pipeline stages", "checkpoints", "logging", "evaluation"}
_GROUPS_LEFT_OUT |= {"faults and signals", "data", "number formats, seed and ranks"}
_KEPT = {"seq_length", "encoder_seq_length", "decoder_seq_length", "reset_position_ids", "reset_attention_mask"}
_KEPT |= {"eod_mask_loss", "create_attention_mask_in_dataloader"}
_FORMATS = {"fp16", "bf16", "fp64"}
_KEPT |= {*_FORMATS, "seed", "deterministic_mode"}
"""Flags of groups that are otherwise left out."""
_LEFT_OUT = {"global_batch_size", "rampup_batch_size", "decrease_batch_size_if_needed", "step_batch_size_schedule"}
_LEFT_OUT |= {"iterations_to_skip", "exit_interval", "exit_duration_in_mins"}
_LEFT_OUT |= {"manual_gc", "manual_gc_interval", "manual_gc_eval", "layout_invariant"}
_LEFT_OUT |= {"use_distributed_optimizer", "overlap_param_gather", "overlap_param_gather_with_optimizer_step"}
_LEFT_OUT |= {"cp_comm_type", "recompute_activations", "optimizer_cpu_offload", "optimizer_offload_fraction"}
_LEFT_OUT |= {"optimizer_nvme_offload_path", "param_nvme_offload_path"}
_LEFT_OUT |= {"use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params"}
"""Flags of other groups that describe the layout, the speed or the course of the run."""


_COUNT = Integer()
_FINDING = Record(
    {"rank": _COUNT, "phase": Text(), "name": Text(), "bad": _COUNT, "elements": _COUNT},
    optional={"microbatch": Nullable(_COUNT), "sample_ids": ListOf(Integer(-1))},
)
_REPORT = Record(
    {
        "iteration": Integer(1),
        "micro_batch_size": Integer(1),
        "data_parallel_size": Integer(1, 1 << 20),
        "findings": ListOf(_FINDING),
    }
)
"""The report in the folder of a step."""


@dataclass(frozen=True)
class DumpedStep:
    """A step as a run wrote it."""

    folder: Path
    iteration: int
    """Number of the step, from 1."""
    micro_batch_size: int
    batches: list[Any]
    """Micro-batches of all data parallel ranks, in the order of the run's samples."""
    data_parallel_size: int
    findings: list[Finding]
    """What the run found when it computed the step again."""
    manifest: Manifest
    """The manifest of the checkpoint."""

    def place(self, number: int) -> str:
        """Returns which micro-batch of the run is number `number` of `batches`."""
        return (
            f"micro-batch {number // self.data_parallel_size} of data parallel rank {number % self.data_parallel_size}"
        )


def read_dump(folder: Path) -> DumpedStep:
    """Reads a folder that a run wrote. Raises UserError if something is missing in it."""
    path = folder / REPORT
    try:
        report = parse_json(read_regular_file(path))
        problem = _REPORT.problem(report)
        if problem is not None:
            raise ValueError(problem)
        ranks, iteration, size = (report[name] for name in ("data_parallel_size", "iteration", "micro_batch_size"))
        findings = [Finding.from_json(each) for each in report["findings"]]
        by_rank = []
        for rank in range(ranks):
            path = folder / f"batch_dp_{rank:05d}.safetensors"
            by_rank.append(read_batches(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{folder} is not the whole dump of a step (nonfinite/iteration_NNNNNNN): {path}: {reason}"
        ) from error
    checkpoint = find_checkpoint(folder, None)
    if checkpoint is None:
        raise UserError(f"{folder} holds no checkpoint of the state before the step")
    batches = [batch for micro_batch in zip(*by_rank, strict=True) for batch in micro_batch]
    return DumpedStep(folder, iteration, size, batches, ranks, findings, checkpoint.manifest)


def command_of(dump: DumpedStep, words: Sequence[str] = ()) -> list[str]:
    """Returns the command line that computes the step in one process: that of the run without its layout, data, logs
    and checkpoints. `words` are further flags, which replace those of the run."""
    source = dump.folder / folder_name(dump.manifest.iteration)
    recorded, table = command_line_in(source, dump.manifest), flags_by_spelling()
    unknown = [one.spelling for one in translate_all(split_words(recorded)[0])[0] if one.spelling not in table]
    if unknown:
        name = shown(unknown[0])
        raise UserError(f"{source / MANIFEST}: config.command_line has {name}, which this release does not know")
    replaced = _fields_of(words)
    check_spec(recorded, given="spec" in replaced)
    replaced |= _FORMATS if replaced & _FORMATS else set()

    def is_kept(flag: Flag) -> bool:
        return flag.field not in _LEFT_OUT | replaced and (flag.group not in _GROUPS_LEFT_OUT or flag.field in _KEPT)

    kept = [word for _, occurrence in flags_of_model(recorded, is_kept) for word in occurrence.as_words()]
    kept += ["--global-batch-size", str(dump.micro_batch_size * len(dump.batches)), "--mock-data", "--num-workers", "0"]
    return [*kept, "--eval-iters", "0", "--load", str(dump.folder), "--no-load-optim", *words]


def _fields_of(words: Sequence[str]) -> set[str]:
    table = flags_by_spelling()
    return {table[each.spelling].field for each in split_words(words)[0] if each.spelling in table}


class _NoData(Dataset[Any]):
    """Stands in for the training data, which is not read."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, number: int) -> Any:
        raise AssertionError("a replay reads the batches of the dump")


def replay(
    dump: DumpedStep, providers: Providers, add_flags: ExtraArgsProvider | None = None, words: Sequence[str] = ()
) -> SearchResult:
    """Computes forward and backward of the step in this process, with the model of a script's providers.

    The micro-batch numbers of the findings are those of `dump.batches`.
    """
    family = dump.manifest.config.get("model_family")
    defaults = {"model_family": family} if family is not None else None
    # The cluster's variables describe the run's ranks, not this process.
    alone = LaunchEnvironment(1, LaunchEnvironment.of_this_process().has_cuda)
    config = configure(command_of(dump, words), add_flags, defaults, launch_environment=alone)
    providers = dataclasses.replace(providers, build_datasets=lambda context, counts: (_NoData(), None, None))
    with SignalWatch([]) as signals, process_environment(config, publication=providers.publication) as environment:
        trainer = set_up(config, providers, environment, signals, time.monotonic())
        with _closed(trainer):
            common = dump.manifest.common.get("optimizer")
            if common is not None:
                trainer.optimizer.load_common_state(common)  # the loss scale
            return search_step(trainer, RecentStep(dataclasses.replace(trainer.state), dump.batches))


@contextlib.contextmanager
def _closed(trainer: Trainer) -> Iterator[None]:
    try:
        yield
        trainer.close()
    except BaseException as error:
        trainer.close_after_failure(error)
        raise


def report(dump: DumpedStep, result: SearchResult, words: Sequence[str] = ()) -> Iterator[str]:
    """Yields the lines about a replay with these further flags: the losses, the first non-finite values, and the run's
    own findings."""
    for number, losses in enumerate(result.losses):
        shown = ", ".join(f"{name} {value:.6g}" for name, value in losses.items())
        yield f"{dump.place(number)}: {shown}"
    for finding in result.findings:
        where = "" if finding.microbatch is None else f" ({dump.place(finding.microbatch)} of the run)"
        yield f"non-finite: {dataclasses.replace(finding, rank=0)}{where}"
    if not result.findings and _fields_of(words) & _FORMATS:
        yield (
            f"everything is finite with {' '.join(words)}; if a replay without these flags finds a non-finite value, "
            "a number is too large for the run's number format"
        )
    elif not result.findings:
        yield (
            "everything is finite in one process: suspect the layout (tools/verify_layout.py checks it), another "
            "kernel, or broken hardware"
        )
    if dump.findings:
        yield f"the run's first: {dump.findings[0]}"
    else:
        yield "the run computed the step again as well, and found everything finite"
