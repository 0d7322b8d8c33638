"""Where the time of a step goes, from hand-made traces whose answer is known and from one that the profiler writes."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.training.hooks.profiler import TorchProfiler
from megatron.training.log.timeline import kind_of, merged, read_step_times, short_ranks, step_times, without


def event(cat: str, name: str, start: float, stop: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": stop - start, "pid": 0, "tid": 7, "args": args}


def sent(kernel: str, start: float, stop: float, group: str, elements: int, **args: Any) -> dict[str, Any]:
    more = {"Process Group Name": group, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "BFloat16"}
    return event("kernel", f"ncclDevKernel_{kernel}(ncclDevKernelArgsStorage<4096ul>)", start, stop, **more | args)


GROUPS = {
    "rank": 2,
    "pg_config": [
        {"pg_name": "a", "ranks": [0, 1, 2, 3]},
        {"pg_name": "b", "ranks": [2, 6]},
    ],
}

# Two steps in 200 us of the device, from 1000: computed 1000-1040, 1060-1080, 1150-1200.
GPU = [
    event("user_annotation", "ProfilerStep#4", 900.0, 950.0),
    event("user_annotation", "ProfilerStep#5", 950.0, 990.0),
    event("gpu_user_annotation", "ProfilerStep#5", 1100.0, 1200.0),
    event("cpu_op", "aten::mm", 900.0, 980.0),
    event("cpu_op", "nccl:all_to_all", 900.0, 910.0),
    event("kernel", "gemm", 1000.0, 1030.0),
    event("kernel", "add", 1020.0, 1040.0),
    event("kernel", "gemm", 1060.0, 1080.0),
    event("kernel", "gemm", 1150.0, 1200.0),
    sent("SendRecv", 1030.0, 1065.0, "a", 1_000_000, **{"Collective name": "all_to_allv"}),  # 20 us exposed
    sent("AllGather_RING_LL", 1062.0, 1070.0, "b", 0, **{"Process Group Ranks": "[2, 6]"}),  # hidden
    sent("AllReduce_Sum_bf16_RING_LL", 1100.0, 1120.0, "b", 500_000),  # 20 us exposed
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1110.0, 1130.0),  # 10 us beside the reduction
    event("gpu_memset", "Memset (Device)", 1030.0, 1035.0),  # behind a kernel
]


def written(tmp_path: Path, events: list[dict[str, Any]], name: str = "rank_00002.trace.json") -> Path:
    path = tmp_path / name
    text = json.dumps({"distributedInfo": GROUPS, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_parts_of_a_step_on_a_gpu(tmp_path: Path, name: str) -> None:
    times = read_step_times(written(tmp_path, GPU, name))
    assert (times.device, times.steps, times.rank) == ("GPU", 2, 2)
    # Microseconds of both steps, halved and in milliseconds.
    assert times.step == pytest.approx(0.100)
    assert times.computing == pytest.approx(0.055)
    assert times.communicating == pytest.approx((35 + 5 + 20) * 0.0005)
    assert times.exposed_communication == pytest.approx(0.020)
    assert times.exposed_copies == pytest.approx(0.005)
    assert times.idle == pytest.approx(0.020)
    found = {(part.name, part.ranks): part for part in times.communications}
    assert set(found) == {("all_to_all", "0-3"), ("all_gather", "2,6"), ("all_reduce", "2,6")}
    exchange = found["all_to_all", "0-3"]
    assert (exchange.calls, exchange.megabytes) == (0.5, pytest.approx(1.0))
    assert (exchange.busy, exchange.exposed) == (pytest.approx(0.0175), pytest.approx(0.010))
    assert found["all_gather", "2,6"].exposed == 0.0
    assert [(kernel.name, kernel.calls) for kernel in times.kernels] == [("gemm", 1.5), ("add", 0.5)]


def test_the_parts_of_a_step_on_a_cpu() -> None:
    events = [
        event("user_annotation", "ProfilerStep#0", 0.0, 100.0),
        event("cpu_op", "ExchangeBackward", 10.0, 70.0),  # a node that waits is not computation
        event("cpu_op", "aten::mm", 10.0, 30.0),
        event("user_annotation", "gloo:all_to_all", 20.0, 60.0),
        event("cpu_op", "aten::add", 60.0, 70.0),
        event("cpu_op", "aten::mm", 120.0, 130.0),  # after the step
    ]
    times = step_times(events, {})
    assert (times.device, times.rank, times.step) == ("CPU", None, pytest.approx(0.1))
    assert times.computing == pytest.approx(0.03) and times.exposed_communication == pytest.approx(0.03)
    assert times.idle == pytest.approx(0.04)
    assert [(part.name, part.ranks) for part in times.communications] == [("all_to_all", "")]


def test_without_marks_all_is_one_step() -> None:
    times = step_times([event("kernel", "gemm", 0.0, 10.0), event("kernel", "gemm", 20.0, 30.0)], {})
    assert (times.steps, times.step, times.idle) == (0, pytest.approx(0.03), pytest.approx(0.01))


def test_what_the_profiler_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = TorchProfiler(1, 3, tmp_path, rank=0)
    for step in range(4):
        profiler.before_step(step)
        torch.ones(64, 64) @ torch.ones(64, 64)
        profiler.after_step(step + 1)
    capsys.readouterr()
    assert profiler.trace is not None
    times = read_step_times(profiler.trace)
    assert (times.device, times.steps) == ("CPU", 2)
    assert 0.0 < times.computing < times.step and times.communications == ()
    assert {"aten::ones": 2.0, "aten::mm": 1.0}.items() <= {part.name: part.calls for part in times.kernels}.items()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclSymkDevKernel_ReduceScatter_LL_Sum", "reduce_scatter"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("_allgather_base", "all_gather"),
        ("all_to_allv", "all_to_all"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send and receive"),
        ("multimem_all_reduce_kernel", "all_reduce"),
        ("Memcpy PtoP (Device -> Device)", "copy to a peer"),
        ("nccl:recv 1->0", "receive"),
        ("something", "something"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_ranks_are_shortened() -> None:
    assert [short_ranks(r) for r in ("[0, 1, 2, 3]", "[0, 4]", [1, 2], [], "")] == ["0-3", "0,4", "1,2", "", ""]
    assert short_ranks("[0, 1, ..., 31]") == "0,1,...,31"


def test_intervals() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert without([(0, 10), (20, 30)], [(-1, 1), (2, 3), (9, 21), (30, 31)]) == [(1, 2), (3, 9), (21, 30)]
    assert without([(0, 10), (11, 12)], [(2, 11.5)]) == [(0, 2), (11.5, 12)]
    assert without([(0, 1)], []) == [(0, 1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"traceEvents": [', "not a whole trace in JSON"),
        (b'{"a": 1}', "it has no traceEvents"),
        (b'{"traceEvents": [{"ph": "M", "name": "x", "ts": 0}]}', "no step in which anything was computed"),
        (None, "No such file"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"{re.escape(str(path))}.*{message}"):
        read_step_times(path)
