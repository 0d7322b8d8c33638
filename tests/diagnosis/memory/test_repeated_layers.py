"""Counts from a few layers equal those of all layers, and periods are found."""

import pytest
from support.command_lines import configured

from megatron.diagnosis.memory import peak, repeated_layers
from megatron.diagnosis.memory.repeated_layers import Period, find_period


def test_periods() -> None:
    assert find_period("aaaaaaaa") == Period(0, 1, 8)
    assert find_period("xaaaaaaaa") == Period(1, 1, 8)
    assert find_period("abbabbabbabbabbabbab") == Period(0, 3, 6)
    assert find_period("aaaaaaaa", at_once=2) == Period(0, 2, 4)
    assert find_period("abcdefgh") is None and find_period("aaa") is None
    assert "".join(Period(1, 2, 5).of_length("xababababab", 2)) == "xabab"
    assert "".join(Period(0, 3, 6).of_length("abbabbabbabbabbabbab", 3)) == "abbabbabbab"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--num-experts 4 --moe-layer-freq ([0]*2+[1]*8) --moe-grouped-gemm",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
    ],
)
def test_a_few_layers_tell_the_bytes_of_all(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(f"--num-layers 10 {flags}")
    found = peak.peaks_of_ranks(config)
    assert find_period("xxaaaaaaaa") is not None
    monkeypatch.setattr(repeated_layers, "find_period", lambda kinds, at_once: None)
    assert peak.peaks_of_ranks(config) == found
