"""Operations through torch.compile (--torch-compile): the results of the eager ones, clear refusals.

Most tests use the compiler backend aot_eager. It traces as the default does and computes with torch's own kernels, so
the bits are those of the eager run and no compiler is needed. The slow tests generate kernels: they need g++.
"""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.command_lines import configured, problems_of
from support.runs import Outcome, differences, train, train_all_on_ranks
from torch import Tensor
from torch._dynamo.utils import counters

from megatron.core.backends import LOCAL, Backend, compiled_backend, triton_backend
from megatron.core.ops.activation import Activation, gelu_tanh
from megatron.core.ops.compiled import CompiledBiasAdd, missing_compiler
from megatron.core.ops.norm import rms_norm
from megatron.core.ops.rope import Rotation, rotation_of_angles
from megatron.core.utils.graph_capture import map_tensors

AOT = "--torch-compile --torch-compile-backend aot_eager"
RUN = "--mock-data --fp64 --micro-batch-size 2 --train-iters 3 --eval-iters 0"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def rotation(interleaved: bool, first: int = 0) -> Rotation:
    angles = torch.linspace(0.0, 5.0, 3 * 4)[:, None].expand(-1, 2).reshape(3, 1, 1, 8)
    return dataclasses.replace(rotation_of_angles(angles, interleaved), first=first)


SWIGLU = Activation(F.silu, gated=True)
CASES: dict[str, tuple[str, list[Tensor], tuple[Any, ...]]] = {
    "layer_norm": ("layer_norm", tensors((5, 8), (8,), (8,)), (1e-5, False)),
    "layer_norm zero-centered": ("layer_norm_with_residual", tensors((5, 8), (8,), (8,)), (1e-5, True)),
    "rms_norm": ("rms_norm", tensors((5, 8), (8,)), (1e-5, False)),
    "rms_norm of heads": ("rms_norm", tensors((3, 2, 2, 8), (8,)), (1e-5, False)),
    "rms_norm zero-centered": ("rms_norm_with_residual", tensors((5, 8), (8,)), (1e-5, True)),
    "rope": ("apply_rope", tensors((3, 2, 2, 8)), (rotation(False),)),
    "rope of a part": ("apply_rope", tensors((3, 2, 2, 2, 12)), (rotation(False, 2),)),
    "rope interleaved": ("apply_rope", tensors((3, 2, 2, 10)), (rotation(True),)),
    "swiglu": ("weighted_activation", tensors((5, 16)), (None, None, SWIGLU)),
    "swiglu of experts": ("weighted_activation", tensors((5, 16)), (None, tensors((5,))[0], SWIGLU)),
    "gelu with bias": ("weighted_activation", tensors((5, 16), (16,)), (None, Activation(gelu_tanh))),
    "sum": ("bias_dropout_add", tensors((5, 8), (8,), (5, 8)), (0.0, None)),
}


def operations_of(backend: Backend) -> dict[str, Any]:
    return {name: operation for record in backend.records().values() for name, operation in vars(record).items()}


def results(backend: Backend, case: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """Returns the output of a case's operation and the gradients of all its inputs."""
    name, values, rest = CASES[case]
    inputs = [value.to(device, dtype, copy=True).requires_grad_() for value in values]
    outputs = operations_of(backend)[name](*inputs, *map_tensors(lambda given: given.to(device), rest))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((output * tensors(output.shape)[0].to(device, dtype)).sum() for output in outputs).backward()
    return [*outputs, *(value.grad for value in inputs if value.grad is not None)]


@pytest.mark.slow_cases("rms_norm of heads", "rope of a part", "rope interleaved")
@pytest.mark.parametrize("case", CASES)
def test_a_traced_operation_has_the_bits_of_the_eager_one(case):
    """It is one graph: nothing in it falls back to eager."""
    counters.clear()
    expected, found = (results(backend, case) for backend in (LOCAL, compiled_backend(LOCAL, "aot_eager")))
    assert len(expected) > len(CASES[case][1])
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) and one.is_contiguous() == other.is_contiguous()
    assert not counters["graph_break"] and counters["frames"]["ok"] == counters["frames"]["total"]


@pytest.mark.fast("rope")
@pytest.mark.parametrize("case", ["rope", "rope interleaved"])
def test_gradients_of_rotary_positions_are_rounded_once(case):
    backends = LOCAL, compiled_backend(LOCAL, "aot_eager")
    expected, found = (results(backend, case, torch.bfloat16) for backend in backends)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def forwards_without_end(graph: torch.fx.GraphModule) -> list[str]:
    """Returns the last calls of traced autograd functions that return their own argument: torch 2.11 then computes
    gradients of zero."""
    found = []
    for name, body in graph.named_modules():
        if "fwd_body" in name:
            (last, *_), _ = next(node.args[0] for node in body.graph.nodes if node.op == "output")
            given = [node.meta["example_value"] for node in last.all_input_nodes]
            if last.op == "call_method" and last.target == "to" and given[0].dtype is last.meta["example_value"].dtype:
                found.append(f"{name}: {last.format_node()}")
    return found


@pytest.mark.fast("types0")
@pytest.mark.parametrize("types", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)])
def test_a_traced_norm_does_not_return_the_argument_of_its_last_call(types):
    graphs: list[torch.fx.GraphModule] = []
    traced = torch.compile(rms_norm, backend=lambda graph, _: graphs.append(graph) or graph)
    inputs, weight = (
        values.to(dtype).requires_grad_() for values, dtype in zip(tensors((5, 8), (8,)), types, strict=True)
    )
    for given in (weight, None):
        traced(inputs, given, 1e-5, False)
    assert len([name for graph in graphs for name, _ in graph.named_modules() if "fwd_body" in name]) == 2
    assert not any(forwards_without_end(graph) for graph in graphs)


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        pytest.param("cpu", torch.float64, 1e-13, marks=pytest.mark.slow),
        pytest.param("cpu", torch.bfloat16, 2e-2, marks=pytest.mark.slow),
        pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float64, 1e-13, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
    ],
)
def test_generated_kernels_agree_with_the_eager_operation(device, dtype, tolerance):
    """This test needs g++, on a GPU Triton."""
    assert missing_compiler(has_gpu=device == "cuda") is None
    inductor = compiled_backend(LOCAL, "inductor")
    for case in CASES:
        expected, found = (results(backend, case, dtype, device) for backend in (LOCAL, inductor))
        for one, other in zip(expected, found, strict=True):
            assert torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(one.abs().max())), case


def test_dropout_is_left_to_the_kernels_that_draw_its_masks():
    calls = []
    base = LOCAL.with_operations(dropout={"bias_dropout_add": lambda *given: calls.append(given)})
    add = compiled_backend(base, "aot_eager").dropout.bias_dropout_add
    for given in ((1, 2, 3, 0.5, "position"), (1, None, 3, 0.0, None), (1, 2, None, 0.0, None)):
        add(*given)
        assert calls.pop() == given


def test_our_own_kernels_for_gpus_stay():
    own = triton_backend()
    compiled = compiled_backend(own, "aot_eager")
    ours, both, generated = map(operations_of, (own, compiled, compiled_backend(LOCAL, "aot_eager")))
    for name in {case[0] for case in CASES.values()}:
        found, plain = both[name], generated[name]
        assert found.cuda is ours[name].cuda
        assert found.cpu is plain or isinstance(plain, CompiledBiasAdd)
    assert compiled.fp8_kernels is own.fp8_kernels
    (line,) = (line for line in configured("--torch-compile --bf16", has_cuda=True).notes if "--torch-compile" in line)
    assert line.startswith("--torch-compile has no effect here: our own kernels compute norms")
    local = configured("--torch-compile --bf16 --transformer-impl local", has_cuda=True).notes
    assert any(line.startswith("--torch-compile (inductor): norms") for line in local)


def agrees(eager: Outcome, compiled: Outcome, tolerance: float = 0.0) -> None:
    """Compares losses and all state at the end: weights, and the gradients that Adam has averaged."""
    for one, other in zip(eager.steps, compiled.steps, strict=True):
        assert other.losses == pytest.approx(one.losses, rel=tolerance, abs=0.0)
    if not tolerance:
        assert differences(eager.at_end, compiled.at_end) == []
    assert compiled.at_end.keys() == eager.at_end.keys()
    for name, value in eager.at_end.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            room = tolerance * float(value.abs().max()) if value.numel() else 0.0
            torch.testing.assert_close(compiled.at_end[name], value, rtol=0.0, atol=room, msg=name)


KINDS = {
    "gpt": "--hidden-dropout 0 --eval-iters 1",
    "llama": f"{LLAMA} --qk-layernorm",
    "recompute": f"{LLAMA} {FULL}",
    "recomputed parts": f"{LLAMA} --recompute-granularity selective --recompute-modules core_attn mlp_act layernorm",
    "moe": f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm",
}


@pytest.mark.parametrize(
    "kinds",
    # `gpt` and those of the second row run every operation; the others run the same ones from within other modules.
    [
        ("gpt",),
        pytest.param(("llama", "recomputed parts"), marks=pytest.mark.slow),
        pytest.param(("recompute", "moe"), marks=pytest.mark.slow),
    ],
)
def test_a_compiled_run_has_the_bits_of_the_eager_run(capfd, kinds):
    for kind in kinds:
        counters.clear()
        agrees(train(f"{RUN} {KINDS[kind]}"), train(f"{RUN} {KINDS[kind]} {AOT}"))
        assert counters["frames"]["ok"] == counters["frames"]["total"] and not counters["graph_break"]
    assert "--torch-compile (aot_eager): norms, rotary positions, activations and sums" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_generated_kernels_agrees_in_float64(kind):
    """This test needs g++."""
    agrees(train(f"{RUN} {KINDS[kind]}"), train(f"{RUN} {KINDS[kind]} --torch-compile"), 1e-11)


LAYOUTS = {
    "tp2 sp": f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "zero": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "sharded weights": f"{LLAMA} --use-torch-fsdp2",
    "cp2": f"{LLAMA} --context-parallel-size 2",
    "ep2": f"{LLAMA} --num-experts 4 --expert-model-parallel-size 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [("tp2 sp",), pytest.param((*LAYOUTS,)[1:], marks=pytest.mark.slow)])
def test_every_layout_has_the_bits_of_the_eager_run(layouts):
    runs = [f"{RUN} {LAYOUTS[layout]} {how}" for layout in layouts for how in ("", AOT)]
    for outcomes in train_all_on_ranks(runs, 2):
        for eager, compiled in zip(outcomes[::2], outcomes[1::2], strict=True):
            agrees(eager, compiled)


@pytest.mark.fast("eager to compiled")
@pytest.mark.parametrize("modes", [("", AOT), (AOT, "")], ids=["eager to compiled", "compiled to eager"])
def test_a_checkpoint_goes_on_in_the_other_mode(modes, tmp_path):
    before, after = modes
    whole = train(RUN)
    train(f"{RUN} --exit-interval 2 --save {tmp_path} {before}")
    resumed = train(f"{RUN} --load {tmp_path} {after}")
    agrees(dataclasses.replace(whole, steps=whole.steps[2:]), resumed)


def test_without_a_compiler_the_command_line_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (problem,) = (line for line in problems_of("--torch-compile") if "--torch-compile" in line)
    assert "there is no C++ compiler no-such-compiler, which a CPU needs; install g++" in problem
    for flags in (AOT, "--torch-compile --dry-run"):
        assert not any("--torch-compile" in line for line in problems_of(flags))
