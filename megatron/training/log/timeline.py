"""Divides the time of a step into computation, communication and idle time, from a trace of PyTorch's profiler.

Communication is *exposed* while the same rank computes nothing; better overlap could save at most this time. On a GPU
the trace's kernels are counted. A collective's kernel also waits for the other ranks, so waiting for slower ranks is
counted as communication. On a CPU, torch's operators are computation and gloo's threads communication.
"""

import gzip
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError

Intervals = list[tuple[float, float]]
"""Intervals in microseconds, sorted, without overlap."""


@dataclass(frozen=True)
class TimeShare:
    """Milliseconds per step of one kind of communication among a set of ranks, or of one kernel."""

    name: str
    """all_reduce, all_to_all, ..., or the name of the kernel."""
    ranks: str
    """Global ranks, as 0-3 or 0,4; empty if the trace does not contain them."""
    calls: float
    """Calls per step."""
    busy: float
    """Time during which at least one call runs."""
    exposed: float
    """The part of `busy` during which nothing is computed. If two kinds run at once, both count it."""
    megabytes: float
    """Size of this rank's input or output, the larger of the two; 0 if the trace does not contain it."""


@dataclass(frozen=True)
class StepTimes:
    """A step's time in milliseconds, the mean over the steps of a trace.

    step = computing + exposed_communication + exposed_copies + idle.
    """

    device: str
    """GPU or CPU."""
    steps: int
    """Steps in the trace; 0: the trace marks no steps and is taken as one."""
    rank: int | None
    step: float
    computing: float
    communicating: float
    """Exposed and hidden communication together."""
    exposed_communication: float
    exposed_copies: float
    """Copies and fills of memory while neither computation nor communication runs."""
    idle: float
    communications: tuple[TimeShare, ...]
    """Communication by kind and ranks, the most exposed first."""
    kernels: tuple[TimeShare, ...]
    """Kernels that compute (on a CPU torch's operators), the longest first."""


def read_step_times(path: str | os.PathLike[str]) -> StepTimes:
    """Reads a trace in Chrome's JSON format, as --profile --use-pytorch-profiler writes it, plain or gzipped.

    Raises UserError if the file is no such trace, or if its steps compute nothing.
    """
    path = Path(path)
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            trace = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else f"not a whole trace in JSON ({error})"
        raise UserError(f"{path}: cannot read the trace: {reason}") from error
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise UserError(f"{path}: cannot read the trace: it has no traceEvents")
    info = trace.get("distributedInfo", {}) if isinstance(trace, dict) else {}
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) >= 0]
    try:
        return step_times(timed, info)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def step_times(events: Sequence[dict[str, Any]], distributed: dict[str, Any]) -> StepTimes:
    """Returns the times of a trace, given its complete events ("X") and its `distributedInfo`."""
    on_device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    groups = {group["pg_name"]: group.get("ranks", []) for group in distributed.get("pg_config", [])}
    marks = [event for event in events if event.get("cat") == "user_annotation" and "ProfilerStep" in event["name"]]
    if on_device:
        # The host runs ahead of the device, so the marks of steps give their number, but not their time on the device.
        sorts, start, stop = _sorts_of_device(on_device, groups), _start(on_device), _stop(on_device)
    else:
        window = marks or [event for event in events if event.get("cat") == "cpu_op"]
        sorts, start, stop = _sorts_of_host(events), _start(window), _stop(window)
    if stop <= start or not any(sorts.values()):
        raise UserError("the trace has no step in which anything was computed")
    scale = 1e-3 / (len(marks) or 1)  # microseconds of all steps -> milliseconds of one

    def time(intervals: Intervals) -> float:
        return sum(stop - start for start, stop in intervals) * scale

    def cut(events: Iterable[dict[str, Any]]) -> Intervals:
        spans = ((max(event["ts"], start), min(event["ts"] + event["dur"], stop)) for event in events)
        return merged(span for span in spans if span[0] < span[1])

    def parts(named: dict[tuple[str, str], list[dict[str, Any]]], computing: Intervals) -> Iterator[TimeShare]:
        for (name, ranks), of_one in named.items():
            busy, megabytes = cut(of_one), sum(map(_nbytes, of_one)) / 1e6
            calls = len(of_one) / (len(marks) or 1)
            yield TimeShare(
                name, ranks, calls, time(busy), time(without(busy, computing)), megabytes / (len(marks) or 1)
            )

    computing = cut(event for of_one in sorts["compute"].values() for event in of_one)
    sending = cut(event for of_one in sorts["communicate"].values() for event in of_one)
    copying = cut(event for of_one in sorts["copy"].values() for event in of_one)
    exposed, step = without(sending, computing), (stop - start) * scale
    copies = without(without(copying, computing), sending)
    return StepTimes(
        "GPU" if on_device else "CPU",
        len(marks),
        distributed.get("rank"),
        step,
        time(computing),
        time(sending),
        time(exposed),
        time(copies),
        max(step - time(computing) - time(exposed) - time(copies), 0.0),
        tuple(sorted(parts(sorts["communicate"], computing), key=lambda part: (-part.exposed, -part.busy))),
        tuple(sorted(parts(sorts["compute"], []), key=lambda part: -part.busy)),
    )


def merged(spans: Iterable[tuple[float, float]]) -> Intervals:
    """Returns the union of spans of time."""
    found: Intervals = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def without(spans: Intervals, others: Intervals) -> Intervals:
    """Returns the part of `spans` outside all `others`."""
    left, place = [], 0
    for start, stop in spans:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < stop:
            if others[at][0] > start:
                left.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < stop:
            left.append((start, stop))
    return left


def _start(events: Sequence[dict[str, Any]]) -> float:
    return min((event["ts"] for event in events), default=0.0)


def _stop(events: Sequence[dict[str, Any]]) -> float:
    return max((event["ts"] + event["dur"] for event in events), default=0.0)


# Kinds of events -----------------------------------------------------------------------------------------------------

Sorts = dict[str, dict[tuple[str, str], list[dict[str, Any]]]]
"""compute, communicate, copy -> (name, ranks) -> events."""

# Kernels of NCCL, and those of torch and NVSHMEM by which ranks write into each other's memory.
_SENDS = re.compile(r"nccl|nvshmem|multimem|one_shot_all_?reduce|two_shot_all_?reduce|symm_mem|Memcpy P(to|2)P", re.I)

_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send and receive",
    "ptop": "copy to a peer",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}

_WIDTHS = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2}


def _sorts_of_device(events: Iterable[dict[str, Any]], groups: dict[str, list[int]]) -> Sorts:
    sorts: Sorts = {"compute": defaultdict(list), "communicate": defaultdict(list), "copy": defaultdict(list)}
    for event in events:
        arguments = event.get("args", {})
        if _SENDS.search(event["name"]):
            given = arguments.get("Process Group Ranks") or groups.get(str(arguments.get("Process Group Name")), "")
            name = kind_of(str(arguments.get("Collective name", "")) or event["name"], event["name"])
            sorts["communicate"][name, short_ranks(given)].append(event)
        elif event["cat"] == "kernel":
            sorts["compute"][event["name"], ""].append(event)
        else:
            sorts["copy"][event["name"], ""].append(event)
    return sorts


def _sorts_of_host(events: Iterable[dict[str, Any]]) -> Sorts:
    sorts: Sorts = {"compute": defaultdict(list), "communicate": defaultdict(list), "copy": {}}
    for event in events:
        if event["name"].startswith("gloo:"):
            sorts["communicate"][kind_of(event["name"]), ""].append(event)
        elif event.get("cat") == "cpu_op" and event["name"].startswith("aten::"):  # not autograd's nodes, which wait
            sorts["compute"][event["name"], ""].append(event)
    return sorts


def kind_of(name: str, otherwise: str = "") -> str:
    """Returns the kind of a collective or of its kernel: ncclDevKernel_AllGather_RING_LL(...) -> all_gather."""
    for text in (name, otherwise):
        bare = re.sub(r"[^a-z]", "", text.lower())
        for word, kind in _KINDS.items():
            if word in bare:
                return kind
    return name


def short_ranks(ranks: str | Sequence[int]) -> str:
    """Returns ranks as text: [0, 1, 2, 3] -> 0-3; [0, 4] -> 0,4."""
    numbers = [int(number) for number in re.findall(r"\d+", ranks)] if isinstance(ranks, str) else list(ranks)
    if isinstance(ranks, str) and "..." in ranks:  # the writer of the trace shortened the list
        return ranks.strip("[]").replace(" ", "")
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def _nbytes(event: dict[str, Any]) -> int:
    arguments = event.get("args", {})
    if "bytes" in arguments:
        return int(arguments["bytes"])
    elements = max(int(arguments.get("In msg nelems", 0) or 0), int(arguments.get("Out msg nelems", 0) or 0))
    return elements * _WIDTHS.get(str(arguments.get("dtype", "")).lower(), 1)
