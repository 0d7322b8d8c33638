"""Counts from a few layers equal those of all layers, and periods are found."""

import pytest
from support.command_lines import SMALL, configured

from megatron.diagnosis.memory import peak, repeated_layers
from megatron.diagnosis.memory.repeated_layers import chosen_units


def test_the_first_and_the_last_two_of_each_kind_are_counted() -> None:
    assert chosen_units("aaaaaaaa") == [0, 6, 7]
    assert chosen_units("xaaaaaay") == [0, 1, 5, 6, 7]
    assert chosen_units("aabaabaabaa") == [0, 2, 5, 8, 9, 10]
    assert chosen_units("ab") == [0, 1]


HYBRID = "--mamba-num-heads 4 --mamba-head-dim 16 --mamba-num-groups 2 --hybrid-layer-pattern"
EXPERTS = "--num-experts 4 --moe-grouped-gemm --moe-router-topk 2"


@pytest.mark.parametrize(
    "flags",
    [
        "--num-layers 10",
        f"--num-layers 10 {EXPERTS} --moe-layer-freq ([0]*2+[1]*8)",
        "--num-layers 9 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        pytest.param(
            "--num-layers 10 --recompute-granularity full --recompute-method block --recompute-num-layers 3",
            marks=pytest.mark.slow,
        ),
        f"{HYBRID} MEM*EMMEMEM-*EMEMEM--M {EXPERTS}",
        pytest.param(f"{HYBRID} -*M-MM-M*M-MMM-MMMMM", marks=pytest.mark.slow),
        "--num-layers 12 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --global-batch-size 8",
        pytest.param(
            f"--num-layers 14 {EXPERTS} --moe-layer-freq ([0]*3+[1]*4)*2 --pipeline-model-parallel-size 2",
            marks=pytest.mark.slow,
        ),
        f"--num-layers 8 {EXPERTS} --expert-model-parallel-size 2 --delay-wgrad-compute",
    ],
)
def test_a_few_layers_tell_the_bytes_of_all(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(flags, ranks=2 if "parallel-size 2" in flags else 1, base=SMALL.replace("--num-layers 2 ", ""))
    found = peak.peaks_of_ranks(config)
    monkeypatch.setattr(repeated_layers, "chosen_units", lambda kinds: list(range(len(kinds))))
    assert peak.peaks_of_ranks(config) == found
