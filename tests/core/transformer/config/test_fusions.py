"""What does not go with operations that torch.compile makes (--torch-compile)."""

import pytest
from support.command_lines import problems_of
from support.fake_transformer_engine import FAKE

from megatron.core.ops.transformer_engine import engine


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--cuda-graph-impl local", "--torch-compile with CUDA graphs"),
        ("--cuda-graph-impl local --cuda-graph-scope attn", "--torch-compile with CUDA graphs"),
        ("--deterministic-mode", "drop it or --deterministic-mode"),
        ("--cpu-offloading-num-layers 1", "--cpu-offloading-num-layers 1 moves tensors that operations save"),
        ("--fine-grained-activation-offloading --offload-modules core_attn", "moves tensors that operations save"),
        ("--num-experts 2 --overlap-moe-expert-parallel-comm", "computes in several threads"),
    ],
)
def test_what_does_not_go_with_compiled_operations_is_refused(flags, problem):
    found = problems_of(f"{flags} --torch-compile --torch-compile-backend aot_eager")
    assert any(problem in line for line in found), found


def test_transformer_engine_has_kernels_of_its_own_if_it_computes(monkeypatch):
    flags = "--torch-compile --torch-compile-backend aot_eager --transformer-impl transformer_engine"
    for found, more, refused in (("it is not installed", "", 0), (FAKE, "", 1), (FAKE, "--fp8-margin 1", 0)):
        monkeypatch.setattr(engine, "find_engine", lambda found=found: found)
        problems = problems_of(f"{flags} --fp8-format hybrid --fp8-recipe tensorwise --bf16 {more}")
        assert [line for line in problems if "--transformer-impl auto or local works" in line] == problems
        assert len(problems) == refused
