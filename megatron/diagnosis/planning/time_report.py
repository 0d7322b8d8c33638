"""Prints the predicted time of a step in the dry run: every figure with its error and what it rests on."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.core.adapters.config import LoraConfig
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.drawing import as_svg
from megatron.core.pipeline_parallel.simulator import TimedAction, Timeline
from megatron.diagnosis.planning.cluster import Cluster, link_of
from megatron.diagnosis.planning.gpus import gpu_named
from megatron.diagnosis.planning.regrouping import PackedDocuments, RegroupingGain, packs_documents
from megatron.diagnosis.planning.step_time import (
    DATA,
    HOST,
    MUON,
    OPTIMIZER,
    STEP,
    StepTime,
    step_time,
    uneven_documents,
)
from megatron.training.config.hardware import HardwareConfig
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment, gpus_of_node

_USUAL_NODE = 8


def cluster_of(hardware: HardwareConfig, launch: LaunchEnvironment, world_size: int) -> Cluster:
    """Returns the machines that the flags describe. Raises UserError for an unknown GPU or link."""
    assert hardware.gpu is not None
    gpu = gpu_named(hardware.gpu)
    node = gpus_of_node(hardware.gpus_per_node, launch) or _USUAL_NODE
    domain = hardware.gpus_per_nvlink_domain or gpu.gpus_per_nvlink_domain or node
    return Cluster(gpu, world_size, node, domain, None if hardware.link is None else link_of(hardware.link))


def time_lines(
    config: PretrainConfig,
    launch: LaunchEnvironment,
    vocab_rows: int,
    parameters: int,
    documents: PackedDocuments | None = None,
) -> Iterator[str]:
    """Yields the lines about time for a run with --gpu. `vocab_rows` is the padded vocabulary, `parameters` the number
    of parameters of the model, and `documents` those of packed rows; None: not known. Raises UserError for an unknown
    GPU or link, or a folder of --plot that cannot be written."""
    hardware = config.hardware
    cluster = cluster_of(hardware, launch, config.world_size)
    assumed = gpus_of_node(hardware.gpus_per_node, launch) is None and config.world_size > 1
    note = " (assumed; --gpus-per-node tells it)" if assumed else ""
    yield f"machines    {cluster.gpus:,} x {cluster.gpu.title}, {cluster.gpus_per_node} in a node{note}"
    try:
        time = step_time(config, cluster, vocab_rows, *_lengths(documents))
    except UserError as error:
        yield f"time        not predicted: {error}"
        return
    yield from _step_lines(time)
    uncounted = list(_uncounted_of_adapters(config.adapters))
    if uncounted:
        yield f"            not counted: {', '.join(uncounted)}"
    if config.transformer.hybrid_context_parallel:
        yield _regrouped_line(time, documents)
    elif packs_documents(config) and documents is None:
        why = "synthetic (--mock-data)" if config.data.mock_data else "not at hand"
        yield f"            attention is counted over whole rows, since the data is {why}: with documents it is faster"
    yield from _run_lines(time, parameters)
    yield from _part_lines(time)
    if hardware.plot is not None:
        yield f"picture     {write_picture(Path(hardware.plot), time)}"


def _step_lines(time: StepTime) -> Iterator[str]:
    mfu = "MFU not known: no peak" if time.mfu is None else f"MFU {time.mfu.value:.1%}"
    yield (
        f"time        {_seconds(time.seconds.value)} a step, +-{time.seconds.error:.0%}; "
        f"{time.tokens_per_second.value:,.0f} tokens/s; {time.tokens_per_second_per_gpu.value:,.0f} tokens/s and "
        f"{time.tflops.value:.0f} TFLOP/s on each GPU, {mfu}"
    )
    if time.part(HOST).value > 0.05 * time.seconds.value:
        yield "            the GPU waits for its host: such steps took 15% less to 34% more than predicted"


def _uncounted_of_adapters(lora: LoraConfig) -> Iterator[str]:
    """Yields the work of adapters of which no time is known."""
    if lora.lora_dropout:
        yield "dropout of adapters (--lora-dropout)"
    if lora.use_dora:
        yield "norms of adapted weights (--use-dora)"
    if lora.lora_base_weights == "nf4":
        yield "decoding of weights in 4 bits (--lora-base-weights)"


def _lengths(documents: PackedDocuments | None) -> tuple[float | None, float]:
    """Returns what `step_time` reads of documents. Dynamic context parallelism has a line of its own about waiting."""
    if documents is None:
        return None, 1.0
    return documents.document_tokens, 1.0 if isinstance(documents, RegroupingGain) else documents.uneven


def _regrouped_line(time: StepTime, found: PackedDocuments | None) -> str:
    if not isinstance(found, RegroupingGain):
        return "            --hybrid-context-parallel is not counted: it depends on the lengths of the data's documents"
    at_end = sum(time.part(name).value for name in (OPTIMIZER, MUON, DATA, STEP))
    even = (time.seconds.value - at_end) / found.row_work  # as if no rank waited for another
    in_rows = time.seconds.value + uneven_documents(time.parts, found.uneven).value
    return (
        f"            that is without waiting: about {_seconds(at_end + even * found.regrouped)} with "
        f"--hybrid-context-parallel, and {_seconds(in_rows)} in rows"
    )


def _run_lines(time: StepTime, parameters: int) -> Iterator[str]:
    if time.days is not None and time.gpu_hours is not None:
        days = f"{time.days.value:,.1f} days" if time.days.value >= 1 else f"{time.days.value * 24:,.2f} hours"
        yield (
            f"            all {time.steps:,} steps: {days}, {_number(time.gpu_hours.value)} GPU-hours, "
            f"{time.tokens * time.steps / parameters:,.3g} tokens per parameter; evaluation, saving and failures are "
            "extra"
        )
    if time.active_weights != time.weights:
        active = parameters - (time.weights - time.active_weights)
        yield f"            {active:,} of {parameters:,} parameters are active for a token"
    if time.bubble:
        yield f"            {time.bubble:.1%} of the ranks' time in the pipeline is bubble"


def _part_lines(time: StepTime) -> Iterator[str]:
    yield f"            {'part of a step':<26}{'ms':>10}{'share':>8}{'error':>8}  rests on"
    for name, part in sorted(time.parts.items(), key=lambda item: -item[1].value):
        share = part.value / time.seconds.value
        yield f"            {name:<26}{part.value * 1e3:>10.1f}{share:>8.1%}{f'+-{part.error:.0%}':>8}  {part.source}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def write_picture(folder: Path, time: StepTime) -> Path:
    """Writes the predicted schedule of a step as step.svg, and returns its path. Times are in milliseconds. Raises
    UserError if the folder cannot be written."""
    path = folder / "step.svg"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(as_svg(time.schedule, _in_milliseconds(time.timeline), unit=" ms"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--plot {folder}: {path} cannot be written: {error.strerror}") from None
    return path


def _in_milliseconds(timeline: Timeline) -> Timeline:
    spans: Sequence[Sequence[TimedAction]] = timeline.spans
    scaled = tuple(
        tuple(replace(span, start=round(span.start * 1e3, 3), stop=round(span.stop * 1e3, 3)) for span in row)
        for row in spans
    )
    return replace(timeline, spans=scaled)
