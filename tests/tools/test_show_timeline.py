"""tools/show_timeline.py: the tables of a trace."""

import json
from pathlib import Path

import pytest

from tools.show_timeline import main

TRACE = {
    "distributedInfo": {"rank": 1},
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#7", "ts": 0.0, "dur": 9.0, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1000.0, "dur": 6000.0, "args": {}},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_SendRecv()",
            "ts": 5000.0,
            "dur": 4000.0,
            "args": {
                "Collective name": "all_to_all",
                "Process Group Ranks": "[0, 1]",
                "In msg nelems": 2_000_000,
                "dtype": "Float",
            },
        },
        {"ph": "X", "cat": "kernel", "name": "add", "ts": 10000.0, "dur": 1000.0, "args": {}},
    ],
}


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(TRACE))
    assert main([str(trace), "--kernels", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{trace}:",
        "GPU of rank 1, mean of 1 steps",
        "  step                          10.000 ms  100.0%",
        "  computing                      7.000 ms   70.0%",
        "  communication, exposed         2.000 ms   20.0%",
        "  copies, exposed                0.000 ms    0.0%",
        "  idle                           1.000 ms   10.0%",
        "communication: 4.000 ms, of which 50% hidden behind computation",
        "  kind              ranks          calls          ms     exposed          MB",
        "  all_to_all        0,1                1       4.000       2.000        8.00",
        "the 1 longest of 2 kernels",
        "          ms   calls  name",
        "       6.000       1  gemm",
    ]


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/none.json: cannot read the trace: No such file or directory\n"
