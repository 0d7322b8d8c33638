"""What does not go with operations that torch.compile makes (--torch-compile)."""

import pytest
from support.command_lines import problems_of


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--cuda-graph-impl local", "--torch-compile with CUDA graphs"),
        ("--cuda-graph-impl local --cuda-graph-scope attn", "--torch-compile with CUDA graphs"),
        ("--transformer-impl transformer_engine", "--transformer-impl auto or local works"),
        ("--deterministic-mode", "drop it or --deterministic-mode"),
        ("--cpu-offloading-num-layers 1", "--cpu-offloading-num-layers 1 moves what single operations save"),
        ("--fine-grained-activation-offloading --offload-modules core_attn", "moves what single operations save"),
        ("--num-experts 2 --overlap-moe-expert-parallel-comm", "computes in several threads"),
    ],
)
def test_what_does_not_go_with_compiled_operations_is_refused(flags, problem):
    found = problems_of(f"{flags} --torch-compile --torch-compile-backend aot_eager")
    assert any(problem in line for line in found), found
