"""What --exact-data-parallel-sums does not cover is refused by name."""

import pytest
from support.command_lines import problems_of

GIVEN = "--exact-data-parallel-sums --deterministic-mode --global-batch-size 8"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--fp16", "--fp16"),
        ("--bf16 --fp8-format hybrid", "--fp8-format hybrid"),
        ("--bf16 --grad-reduce-in-bf16", "--grad-reduce-in-bf16"),
        ("--optimizer muon", "--optimizer muon"),
        ("--num-experts 4", "--num-experts"),
        ("--global-batch-size 65536", "at most 4096 micro-batches of --micro-batch-size"),
    ],
)
def test_others_are_refused(flags: str, problem: str) -> None:
    found = [each for each in problems_of(f"{GIVEN} {flags}") if each.startswith("--exact-data-parallel-sums")]
    assert len(found) == 1 and problem in found[0]


def test_it_needs_repeatable_kernels_and_a_batch() -> None:
    assert problems_of(GIVEN) == [] and problems_of(f"{GIVEN} --bf16 --use-distributed-optimizer") == []
    (found,) = problems_of("--exact-data-parallel-sums --global-batch-size 8")
    assert found.startswith("--exact-data-parallel-sums needs --deterministic-mode")
    (found,) = problems_of("--exact-data-parallel-sums --deterministic-mode")
    assert "needs --global-batch-size" in found
