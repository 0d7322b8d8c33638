"""Traces one step of benchmarks/bench.py on every rank: its time by kind of kernel, and its exposed communication."""

import collections
import dataclasses
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.utils.torch_private import profiler_config_of_all_threads
from megatron.training.log.timeline import StepTimes, TimeShare, read_step_times
from tools.show_timeline import report

_KINDS = {
    "products": r"nvjet|gemm|cu(tlass|blas)|_accumulate_kernel|_product_(specialized_)?kernel|_weight_kernel|_of_block",
    "attention": r"sdpa|flash|fmha|cudnn|_merge|^_(for|back)ward_(specialized_)?kernel|_round_kernel|_max_logits"
    r"|_index_scores|^_(query|key)_gradient_kernel",
    "communication": r"nccl|Memcpy PtoP",
    "state space layers": r"_causal_conv|_chunk_factors|^_(scan|states?|queries|keys|steps)_"
    r"|^_(state|pair|query|key|decay)_gradients",
    "norms": r"_norm_|layer_norm",
    "activations": r"_activation_|_output_gate_",
    "rotary positions, packed gradients": r"_rope|CatArray",
    "dropout, biases, residuals": r"^_apply_kernel|_keep_",
    "loss": r"_statistics|_gradient_kernel",
    "update and gradient norm": r"_adam|_weights_kernel|_momentum_kernel|LpNorm|lpnorm|FusedAdam|multi_tensor_apply",
    "fp8 casts and scales": r"_cast_(kernel|both|groups|tiles)|_largest|_(lines|squares)_kernel|_transpose_kernel",
    "routing and dispatch": r"^_(rows|spread|tokens|place|parts)_|_count_|_best_|_choice_|scatter|[sS]ort",
    "sums": r"CUDAFunctor_add|^_add_|^_sum_",
}
"""Kinds of kernels, by their names; the first that fits counts."""
_PARTS = ("step", "computing", "exposed_communication", "exposed_copies", "idle", "communicating")


def kind_of(kernel: str) -> str:
    """Returns the kind of a kernel with this name, or "other"."""
    return next((kind for kind, names in _KINDS.items() if re.search(names, kernel)), "other")


class StepTrace:
    """The trace of one step. On a GPU it has the GPU's activities alone, so that the host is not slowed down; on a CPU
    torch's operators and gloo's calls."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CUDA if on_gpu else kinds.CPU]
        config = None if on_gpu else profiler_config_of_all_threads()
        self._profiler: Any = torch.profiler.profile(activities=activities, experimental_config=config)
        self._profiler.start()

    def stop(self) -> StepTimes:
        """Ends the trace and returns the times of this rank's step."""
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            return read_step_times(file)

    def kernel_lines(self) -> Iterator[str]:
        """Yields the milliseconds of the step by kind of kernel, and its longest kernels; nothing on a CPU."""
        if not self._on_gpu:  # a table of all operators would take minutes
            return
        kinds: collections.Counter[str] = collections.Counter()
        names: collections.Counter[str] = collections.Counter()
        for event in self._profiler.key_averages():
            if event.device_type == DeviceType.CUDA:
                kinds[kind_of(event.key)] += event.self_device_time_total / 1000
                names[f"{event.count:5d} x {event.key[:110]}"] += event.self_device_time_total / 1000
        if kinds:
            yield f"{sum(kinds.values()):10.2f} ms of kernels in one step"
        for table in (kinds.most_common(), names.most_common(16)):
            yield from (f"{ms:10.2f} ms  {name}" for name, ms in table)


def gather_timeline(times: StepTimes, rank: int) -> dict[str, Any]:
    """Returns the times of all ranks, and of the rank with the most exposed communication its kinds. Collective."""
    entry = dataclasses.asdict(dataclasses.replace(times, rank=rank, kernels=()))
    return timeline_of(RankCoordinator().gather(entry))


def timeline_of(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the entry of a row: the times of the rank with the most exposed communication, in ms, its communication
    by kind, and the times of every rank in the order of `_PARTS`."""
    fullest = max(ranks, key=lambda entry: entry["exposed_communication"])
    rounded = [[round(entry[part], 2) for part in _PARTS] for entry in ranks]
    kinds = [
        {**kind, **{name: round(kind[name], 2) for name in ("busy", "exposed", "megabytes")}}
        for kind in fullest["communications"]
    ]
    own = dict(zip(_PARTS, rounded[ranks.index(fullest)], strict=True))
    return {"device": fullest["device"], "rank": fullest["rank"], **own, "communications": kinds, "ranks": rounded}


def timeline_lines(timeline: dict[str, Any]) -> Iterator[str]:
    """Yields the timeline of a row for the terminal."""
    kinds = tuple(TimeShare(**kind) for kind in timeline["communications"])
    own = {part: timeline[part] for part in _PARTS}
    times = StepTimes(
        device=timeline["device"], steps=1, rank=timeline["rank"], communications=kinds, kernels=(), **own
    )
    title, *lines = report(times)
    yield title.replace("mean of 1 steps", "one step")
    yield from lines
    if len(timeline["ranks"]) > 1:
        yield "each rank in ms: computing, communication exposed, idle (and copies)"
        for rank, (_, computing, exposed, copies, idle, _) in enumerate(timeline["ranks"]):
            yield f"  {rank:<4}{computing:>12.2f}{exposed:>12.2f}{idle + copies:>12.2f}"
