"""benchmarks/measure_experts.py runs anywhere and times every operation of a layer of experts."""

import re

import pytest

from benchmarks.measure_experts import main


def test_every_operation_has_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--tokens",
            "32",
            "--hidden",
            "16",
            "--ffn",
            "8",
            "--experts",
            "4",
            "--topk",
            "2",
            "--skew",
            "1",
            "--repeats",
            "1",
        ]
    )
    table = capsys.readouterr().out.splitlines()
    assert "tokens=32, hidden=16, ffn=8, experts=4, topk=2, skew=1.0" in table[0]
    names = [re.split(r"  +", line)[0] for line in table[2:]]
    both = ("permute", "unpermute", "grouped linear", "weighted activation")
    assert names == ["sort by expert", *(f"{name}, {way}" for name in both for way in ("forward", "backward"))]
    assert all(float(re.split(r"  +", line)[2]) > 0 for line in table[2:])
