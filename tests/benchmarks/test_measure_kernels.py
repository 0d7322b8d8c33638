"""benchmarks/measure_kernels.py runs anywhere and times every memory-bound operation."""

import re

import pytest

from benchmarks.measure_kernels import main


def test_every_operation_has_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"tokens": 32, "hidden": 16, "ffn": 8, "channels": 4, "vocab": 10, "weights": 64, "repeats": 1}
    main([word for name, size in sizes.items() for word in (f"--{name}", str(size))])
    lines = capsys.readouterr().out.splitlines()[2:]
    names = [re.split(r"  +", line)[0] for line in lines]
    assert {"rms norm, backward", "rotary positions, forward", "AdamW", "cross entropy, backward"} <= set(names)
    assert all(float(re.split(r"  +", line)[2]) > 0 for line in lines)
