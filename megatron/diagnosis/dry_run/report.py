"""Prints the result of --dry-run."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.file_pieces import BUFFER_BYTES
from megatron.core.exceptions import UserError
from megatron.core.groups.rank_grid import RankGrid, ranks_text
from megatron.core.parameters import ParameterInfo
from megatron.core.pipeline_parallel.stage_map import stage_map, stage_text, stages_text
from megatron.core.utils.warn import leave_out
from megatron.diagnosis.dry_run.dry_run import DryRun, dry_run, tokens_to_train_on
from megatron.diagnosis.memory.peak import RankPeak, imbalance_of, peak_of
from megatron.diagnosis.memory.picture import draw_peaks
from megatron.diagnosis.memory.rank_memory import MemoryBytes, RankMemory
from megatron.diagnosis.memory.ways_out import way_text, ways_out
from megatron.diagnosis.planning.gpus import gpu_named
from megatron.diagnosis.planning.regrouping import gain_line
from megatron.diagnosis.planning.time_report import time_lines
from megatron.diagnosis.planning.topology import topology_lines
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.print_config import config_lines
from megatron.training.launch.errors import exit_with_problems
from megatron.training.providers import Providers


def print_dry_run(config: PretrainConfig, providers: Providers) -> None:
    """Prints the notes on the flags, the settings with --print-config, and the dry run, on the first process only.
    Exits with code 2 if the run cannot be built, or does not fit into the memory of --gpu, and says so."""
    if os.environ.get("RANK", "0") != "0":
        return
    leave_out(config.notes)
    launch = LaunchEnvironment.of_this_process()
    try:
        run = dry_run(config, providers)
        times = []
        if config.hardware.gpu is not None:
            times = list(time_lines(run.config, launch, run.padded_vocab_size, run.parameters, run.documents))
        if config.hardware.plot is not None and run.peaks:
            drawn = draw_peaks(run.peaks, memory_of_gpu(run.config), Path(config.hardware.plot) / "memory.svg")
            times.append(f"picture     {drawn}")
    except UserError as error:
        exit_with_problems(error)
    shown = config_lines(config) if config.training.print_config else ()
    print(*config.notes, *run.notes, *topology_lines(run.config, launch), *shown, sep="\n")
    print(*report_lines(run.config, run, times), sep="\n", flush=True)
    print(*way_lines(run, providers), sep="\n", flush=True)
    if config.hardware.gpu is not None and run.peaks and fullest_rank(run) > memory_of_gpu(run.config)[0]:
        sys.exit(2)


def report_lines(config: PretrainConfig, run: DryRun, times: Iterable[str] = ()) -> Iterator[str]:
    """Yields the lines of the report. `times` are those about the time of a step."""
    yield from _run_lines(config, run)
    yield from times
    if config.world_size > 1:
        yield ""
        yield from _rank_lines(run)
        yield ""
        yield from _map_lines(config, run.ranks)


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _run_lines(config: PretrainConfig, run: DryRun) -> Iterator[str]:
    transformer, training, grid = config.transformer, config.training, config.grid
    further = f" and {transformer.mtp_num_layers} for multi-token prediction" if transformer.mtp_num_layers else ""
    layers, tokens = f"{transformer.num_layers} layers{further}", f"{config.data.seq_length} tokens per sample"
    if transformer.num_encoder_layers:
        layers = f"{transformer.num_encoder_layers} layers of the encoder, {transformer.num_layers} of the decoder"
        tokens = f"{config.data.seq_length} and {config.data.decoder_seq_length} tokens per sample"
    yield (
        f"model       {layers}, hidden size {transformer.hidden_size}, {transformer.num_attention_heads} heads, "
        f"{tokens}"
    )
    yield f"parameters  {run.parameters:,}; vocabulary {run.vocab_size:,}, stored as {run.padded_vocab_size:,}"
    yield (
        f"ranks       {config.world_size} = tensor {grid.tensor} x pipeline {grid.pipeline} x context {grid.context} "
        f"x data {grid.data}"
    )
    yield (
        f"a step      {training.global_batch_size:,} samples = {run.tokens_per_step:,} tokens, "
        f"{_micro_batches(run)}, "
        f"{run.flops_per_step / 1e12:,.4g} TFLOP"
    )
    if run.regrouping is not None:
        yield gain_line(run.regrouping, grid.context)
    total = tokens_to_train_on(config)
    yield "training    " + (f"{training.train_iters:,} steps, {total:,} tokens" if total else "length not given")
    if config.data.mock_data:
        yield "data        synthetic (--mock-data)"
    for passes in run.data:
        epochs = "" if passes.epochs is None else f"{passes.epochs:.3g} epochs over "
        yield f"data        {epochs}{passes.tokens:,} tokens of {passes.name}"
    memory = run.memory
    gathered = f", {size_text(memory.gathered)} for gathered units" if memory.gathered else ""
    gathered += f", {size_text(memory.quantized)} for quantised weights" if memory.quantized else ""
    where = "on each rank" if len({entry.memory for entry in run.ranks}) == 1 else "on the ranks that need most"
    yield (
        f"memory      {size_text(memory.total)} {where}: weights {size_text(memory.weights)}, gradients "
        f"{size_text(memory.gradients)}, optimizer {size_text(memory.optimizer)}{gathered}"
    )
    for nbytes, transfers, content, folder in (  # reads and writes of all bytes in a step
        (memory.file - memory.weights_file, 2, "optimizer state", config.optimizer.optimizer_nvme_offload_path),
        (memory.weights_file, 3, "weights", config.ddp.param_nvme_offload_path),
    ):
        if nbytes:
            time = _seconds_of_disk(transfers * nbytes)
            yield f"file        {size_text(nbytes)} {where} of {content} in {folder}: {time} in each step"
    if memory.host:
        kinds = {
            "buffers for the optimizer state in the file": memory.file > memory.weights_file,
            "optimizer state": config.optimizer.optimizer_cpu_offload and memory.file == memory.weights_file,
            "buffers for the weights in the file": memory.weights_file > 0,
        }
        kind = ", ".join(name for name, is_there in kinds.items() if is_there)
        yield f"host memory {size_text(memory.host)} {where}: {kind}"
    saving = config.checkpoint
    if saving.non_persistent_local_ckpt_dir is not None:
        copies = saving.replication_factor if saving.replication and config.world_size > 1 else 1
        more = f", of {copies} ranks {size_text(copies * memory.local_copy)}" if copies > 1 else ""
        yield (
            f"local copy  {size_text(memory.local_copy)} {where}{more}, in {saving.non_persistent_local_ckpt_dir}: "
            f"{_seconds_of_disk(copies * memory.local_copy)}; {size_text(2 * copies * memory.local_copy)} from the "
            "second one on, as each is written over the one before the last"
        )
        if saving.async_save:
            staged = memory.local_copy + (BUFFER_BYTES if copies > 1 else 0)
            yield (
                f"staging     {size_text(staged)} of host memory {where}, from which --async-save writes and sends the "
                "local copy: training waits only until the state is there"
            )
    if saving.save is not None:
        shares = [entry.memory.saved for entry in run.ranks]
        yield f"checkpoint  {size_text(sum(shares))} in {saving.save}: {_seconds_of_disk(max(shares))}"
    yield from _peak_lines(run)


def _seconds_of_disk(nbytes: int) -> str:
    """Returns how long one rank's transfer takes, for the rate of a disk that is nowhere written down."""
    return f"{nbytes / 1e9:.2g} s at 1 GB/s for each rank"


def _micro_batches(run: DryRun) -> str:
    if run.config.transformer.hybrid_context_parallel:
        most = run.config.transformer.max_seqlen_per_dp_cp_rank
        return f"as many micro-batches of up to {most:,} tokens on each rank as its documents need"
    return f"{run.microbatches_per_step} micro-batches of {run.config.training.micro_batch_size} on each rank"


def _peak_lines(run: DryRun) -> Iterator[str]:
    """Yields the peak of the rank that allocates most."""
    if not run.peaks:
        yield f"peak        activations are extra, and are not counted here: {run.why_no_peaks}"
        return
    peak = max(run.peaks, key=lambda peak: peak.allocated)
    parts = [
        f"weights, gradients and optimizer {short_size(peak.state)}",
        f"activations {short_size(peak.activations)}",
    ]
    parts += [f"logits {short_size(peak.logits)}"] * (peak.logits > 0)
    parts += [f"buffers {short_size(peak.buffers)}"] * (peak.buffers > 0)
    yield (
        f"peak        {short_size(peak.allocated)} allocated in a step{_on_rank(run, peak)}: {', '.join(parts)}, "
        f"workspace {short_size(peak.workspace)}; CUDA and NCCL take about {short_size(peak.context)} more"
    )
    moving = max(run.peaks, key=lambda peak: peak.host)
    if moving.host:
        yield f"host memory {size_text(moving.host)}{_on_rank(run, moving)}: offloaded activations, page-locked"
    if imbalance_of(run.config) != 1.0:
        yield f"            with {imbalance_of(run.config)} times the mean of tokens at the busiest rank's experts"
    total, name = memory_of_gpu(run.config)
    if total:
        fits = "" if fullest_rank(run) <= total else ": it does not fit"
        yield f"            {fullest_rank(run) / total:.0%} of the {short_size(total)} of {name}{fits}"


def way_lines(run: DryRun, providers: Providers) -> Iterator[str]:
    """Yields the three cheapest ways to take less memory. If the GPU is too small, those that are enough come first."""
    if not run.peaks:
        return
    total = memory_of_gpu(run.config)[0] or fullest_rank(run)
    found = ways_out(
        run.config, lambda config: peak_of(config, providers, run.tokenizer), max(fullest_rank(run) - total, 0)
    )
    yield "to take less memory:" if found else "to take less memory: no flag of this run's layout helps"
    yield from (f"  {way_text(way, short_size)}" for way in found)


def _on_rank(run: DryRun, peak: RankPeak) -> str:
    if run.config.world_size == 1:
        return ""
    return f" on rank {peak.rank}" + (f" and {peak.ranks - 1} like it" if peak.ranks > 1 else "")


def fullest_rank(run: DryRun) -> int:
    """Returns the bytes that the fullest rank takes of its GPU."""
    return max(peak.allocated + peak.context for peak in run.peaks)


def memory_of_gpu(config: PretrainConfig) -> tuple[int, str]:
    """Returns the bytes of a GPU and its name: that of --gpu, else this machine's first; (0, "") without one."""
    if config.hardware.gpu is not None:
        gpu = gpu_named(config.hardware.gpu)
        return int(gpu.memory.value), gpu.title
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, "a GPU of this machine"
    return 0, ""


def size_text(count: int) -> str:
    """Returns a number of bytes in a readable unit and exactly."""
    short = short_size(count)
    return short if short.endswith("bytes") else f"{short} ({count:,} bytes)"


def short_size(count: int) -> str:
    """Returns a number of bytes in a readable unit."""
    value, unit = float(count), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count:,} bytes" if unit == "bytes" else f"{value:.2f} {unit}"


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def _rank_lines(run: DryRun) -> Iterator[str]:
    """Yields a line for each kind of rank: ranks of one kind hold the same stages and take the same memory."""
    kinds: dict[tuple[str, MemoryBytes], list[RankMemory]] = {}
    for entry in run.ranks:
        kinds.setdefault((stages_text(entry.shard.stages), entry.memory), []).append(entry)
    parts = len({id(entry.shard) for entry in run.ranks})
    yield (
        f"memory of each kind of rank in bytes ({parts} parts of the model were built, without memory: ranks that "
        "differ only in their data or context parallel rank hold the same part)"
    )
    gathered = any(memory.gathered for _, memory in kinds)
    quantized = any(memory.quantized for _, memory in kinds)
    titles = ["ranks", "number", "pp", "parameters", "weights", "gradients", "optimizer"]
    titles += ["gathered units"] * gathered + ["quantised"] * quantized + ["state"]
    titles += ["activations", "logits", "messages", "peak"] * bool(run.peaks) + ["layers"]
    rows = []
    for (stages, memory), entries in kinds.items():
        stage = entries[0].place["pp"]
        numbers = [len(entries), stage, max(entry.shard.parameters for entry in entries)]
        numbers += [memory.weights, memory.gradients, memory.optimizer]
        numbers += [memory.gathered] * gathered + [memory.quantized] * quantized + [memory.total]
        if run.peaks:
            peak = run.peaks[stage]
            numbers += [peak.activations, peak.logits, peak.buffers - memory.gathered, peak.allocated]
        who = ranks_text([entry.rank for entry in entries])
        rows.append([who, *(f"{number:,}" for number in numbers), stages])
    yield from _table([titles, *rows], last_left=True)


def _table(rows: Sequence[Sequence[str]], last_left: bool = False) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        if last_left:
            cells[-1] = row[-1]
        yield "  " + "  ".join(cells).rstrip()


# ---------------------------------------------------------------------------------------------------------------------
# Model parts by rank


def _map_lines(config: PretrainConfig, ranks: Sequence[RankMemory]) -> Iterator[str]:
    stages, grid = stage_map(config.transformer), config.grid
    yield "model parts by rank"
    for stage in stages.stages:
        pipeline_rank, chunk = stages.locate(stage.index)
        yield f"  stage {stage.index} = chunk {chunk} of pipeline rank {pipeline_rank}: {stage_text(stage)}"
    yield from _ranks_of_parts(grid)
    yield from _split_lines(grid, ranks)
    yield from _copy_lines(ranks)
    yield from _sharding_lines(grid, ranks)


def _ranks_of_parts(grid: RankGrid) -> Iterator[str]:
    """Yields a row for each pipeline rank and a column for each tensor parallel rank: the ranks with the same part.
    Then the same for experts, if they are split differently."""
    yield from _table(_cells(grid, ("tp",)))
    if grid.axis_size("ep") > 1 or grid.axis_size("etp") != grid.tensor:
        title, *rows = _cells(grid, ("ep", "etp"))
        yield from _table([["experts", *title[1:]], *rows])


def _cells(grid: RankGrid, axes: tuple[str, ...]) -> list[list[str]]:
    cells: dict[tuple[int, ...], list[int]] = {}
    for rank in range(grid.world_size):
        place = grid.coordinates(rank)
        cells.setdefault((place["pp"], *(place[axis] for axis in axes)), []).append(rank)
    columns = sorted({key[1:] for key in cells})
    titles = [" ".join(f"{axis} {n}" for axis, n in zip(axes, column, strict=True)) for column in columns]
    rows = [["ranks", *titles]]
    for stage in range(grid.pipeline):
        rows.append([f"pp {stage}", *(ranks_text(cells[stage, *column]) for column in columns)])
    return rows


_SHARES = {
    ("tp",): "split over tensor parallel ranks",
    ("ep",): "experts split over expert parallel ranks",
    ("etp",): "channels of experts split over expert tensor parallel ranks",
    ("ep", "etp"): "experts split over expert parallel ranks, their channels over expert tensor parallel ranks",
    (): "whole on each of these ranks",
}


def _split_lines(grid: RankGrid, ranks: Sequence[RankMemory]) -> Iterator[str]:
    """Yields which parameters are split among which ranks of a stage, and which each rank holds whole. Layers are alike
    and listed once."""
    found: dict[tuple[str, ...], dict[str, str]] = {axes: {} for axes in _SHARES}
    for info in _all_infos(ranks).values():
        name = re.sub(r"\.\d+\.", ".*.", info.name)
        axes = tuple(axis for axis in sorted(info.sharded_axes) if grid.axis_size(axis) > 1)
        found[axes][name] = " x ".join(map(str, info.global_shape))
    if not any(names for axes, names in found.items() if axes):
        return
    for axes, names in found.items():
        if names:
            yield f"  {_SHARES[axes]}:"
            yield from (f"    {name}  {shape}" for name, shape in names.items())


def _copy_lines(ranks: Sequence[RankMemory]) -> Iterator[str]:
    """Yields the weights of which two pipeline stages have a copy."""
    for name, info in _all_infos(ranks).items():
        if info.tied:
            holders = sorted({h.place["pp"] for h in ranks if any(i.name == name for i in h.shard.infos)})
            yield f"  copies of one weight, whose gradients are summed: {name} on pipeline ranks {ranks_text(holders)}"


def _all_infos(ranks: Sequence[RankMemory]) -> Mapping[str, ParameterInfo]:
    """Returns a descriptor of each tensor of the model, by canonical name."""
    found: dict[str, ParameterInfo] = {}
    for part in {id(entry.shard): entry.shard for entry in ranks}.values():
        for info in part.infos:
            found.setdefault(info.name, info)
    return found


_SHARDED = {
    "optim": "the optimizer's state",
    "optim_grads": "the optimizer's state and gradients",
    "optim_grads_params": "the optimizer's state, gradients and weights",
}


def _sharding_lines(grid: RankGrid, ranks: Sequence[RankMemory]) -> Iterator[str]:
    """Yields what data parallel ranks shard."""
    sharding = ranks[0].shard.shardings["dense"]
    if sharding.shards == 1:
        return
    group = ranks_text(grid.named_group(sharding.shard_group, 0))
    instances = f", as do {sharding.instances - 1} other instances of it" if sharding.instances > 1 else ""
    yield (
        f"  data parallel ranks shard {_SHARDED[sharding.strategy.value]} of each layer, the embedding and the "
        f"head in {sharding.shards} equal parts, such as ranks {group}{instances}"
    )
