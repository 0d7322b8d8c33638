"""Linear layers and the embedding over two ranks, against one: values, every gradient, and what they exchange."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.boxes import error, fill, gradient_errors, part_of
from support.pool import Pool
from torch import Tensor, nn

from megatron.core.communication.collectives import PlannedGroup
from megatron.core.communication.traffic import recorded
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.ops.linear import SequenceShard
from megatron.core.parameters import name_parameters
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_with_grad_accumulation_and_async_allreduce,
)

T, B, IN, OUT, VOCABULARY = 4, 3, 6, 8, 11
TOLERANCE = 1e-13


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def config(sequence_parallel: bool) -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, fp64=True, use_cpu_initialization=True
    )


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def half(whole: Tensor, dim: int) -> Tensor:
    return whole.chunk(2, dim)[dist.get_rank()].clone()


class Expected:
    """y = x W^T + b and the gradients of sum(y * g), on one rank."""

    def __init__(self) -> None:
        self.x, self.g = values(T, B, IN).requires_grad_(), values(T, B, OUT, seed=2)
        self.weight = values(OUT, IN, seed=3).requires_grad_()
        self.bias = values(OUT, seed=4).requires_grad_()
        self.y = F.linear(self.x, self.weight, self.bias)
        (self.y * self.g).sum().backward()
        self.values = {"weight": self.weight.detach(), "bias": self.bias.detach()}
        self.gradients = {"weight": self.weight.grad, "bias": self.bias.grad}


def column(sequence_parallel: bool, gather_output: bool, skip_bias_add: bool) -> dict[str, float]:
    want, group = Expected(), dist.group.WORLD
    layer = ColumnParallelLinear(
        IN,
        OUT,
        config=config(sequence_parallel),
        init_method=nn.init.normal_,
        gather_output=gather_output,
        skip_bias_add=skip_bias_add,
        tp_group=group,
    )
    name_parameters(layer)
    fill(layer, want.values)
    x = (half(want.x, 0) if sequence_parallel else want.x.clone()).detach().requires_grad_()
    output, bias = layer(x)
    assert (bias is layer.bias) if skip_bias_add else (bias is None)
    if skip_bias_add:
        output = output + (want.bias if gather_output else bias)
    expected = want.y if gather_output else half(want.y, -1)
    errors = {"y": error(output.detach(), expected.detach())}
    # Ranks that all have y each send back its whole gradient.
    (output * (want.g if gather_output else half(want.g, -1))).sum().backward()
    errors["x"] = error(x.grad, half(want.x.grad, 0) if sequence_parallel else want.x.grad)
    if skip_bias_add and gather_output:
        layer.bias.grad = part_of(want.bias.grad, layer.bias)
    return errors | gradient_errors(layer, want.gradients, group)


def row(sequence_parallel: bool, input_is_parallel: bool, skip_bias_add: bool) -> dict[str, float]:
    want, group = Expected(), dist.group.WORLD
    layer = RowParallelLinear(
        IN,
        OUT,
        config=config(sequence_parallel),
        init_method=nn.init.normal_,
        bias=True,
        input_is_parallel=input_is_parallel,
        skip_bias_add=skip_bias_add,
        tp_group=group,
    )
    name_parameters(layer)
    fill(layer, want.values)
    x = (half(want.x, -1) if input_is_parallel else want.x.clone()).detach().requires_grad_()
    output, bias = layer(x)
    assert (bias is layer.bias) if skip_bias_add else (bias is None)
    if skip_bias_add:
        output = output + bias
    errors = {"y": error(output.detach(), (half(want.y, 0) if sequence_parallel else want.y).detach())}
    (output * (half(want.g, 0) if sequence_parallel else want.g)).sum().backward()
    errors["x"] = error(x.grad, half(want.x.grad, -1) if input_is_parallel else want.x.grad)
    return errors | gradient_errors(layer, want.gradients, group)


def check(results: list[dict[str, float]]) -> None:
    for rank, errors in enumerate(results):
        assert errors and not {k: v for k, v in errors.items() if not v < TOLERANCE}, (rank, errors)


@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column(sequence_parallel: bool, gather_output: bool, skip_bias_add: bool, pool: Pool) -> None:
    check(pool.run(column, 2, sequence_parallel, gather_output, skip_bias_add))


@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("kind", ["parallel input", "whole input", "sequence parallel"])
def test_row(kind: str, skip_bias_add: bool, pool: Pool) -> None:
    check(pool.run(row, 2, kind == "sequence parallel", kind != "whole input", skip_bias_add))


def test_row_refuses_a_whole_input_under_sequence_parallelism() -> None:
    with pytest.raises(UserError, match=r"input_is_parallel=False does not go with sequence_parallel"):
        RowParallelLinear(
            IN,
            OUT,
            config=config(True),
            init_method=nn.init.normal_,
            bias=True,
            input_is_parallel=False,
            skip_bias_add=False,
            tp_group=PlannedGroup((0, 1), 0),
        )


# ---------------------------------------------------------------------------------------------------------------------
# What is exchanged, and when


class WatchedMainGrad:
    """Sees what is handed to it, and what had been sent by then."""

    def __init__(self, defers_weight_grad: bool, log: list[Any]) -> None:
        self.defers_weight_grad, self.log = defers_weight_grad, log
        self.product: tuple[Tensor, Any] | None = None
        self.sent_before: list[str] = []

    def add_product(self, output_gradient: Tensor, inputs: Any) -> None:
        self.product, self.sent_before = (output_gradient, inputs), [traffic.operation for traffic in self.log]


def exchanges(sequence_parallel: bool, defers_weight_grad: bool) -> dict[str, Any]:
    want = Expected()
    settings = config(sequence_parallel)
    layer = ColumnParallelLinear(
        IN, OUT, config=settings, init_method=nn.init.normal_, bias=False, tp_group=dist.group.WORLD
    )
    name_parameters(layer)
    fill(layer, want.values)
    x = (half(want.x, 0) if sequence_parallel else want.x.clone()).detach().requires_grad_()
    with recorded() as forward:
        output, _ = layer(x)
    with recorded() as backward:
        main_grad = layer.weight.main_grad_accumulator = WatchedMainGrad(defers_weight_grad, backward)
        (output * half(want.g, -1)).sum().backward()
    assert layer.weight.grad is None and main_grad.product is not None
    rows, inputs = main_grad.product
    kept = None
    if isinstance(inputs, SequenceShard):
        kept = inputs.rows.shape[0]
        inputs = inputs.start_gather().wait()
    return {
        "forward": [(t.operation, t.nbytes) for t in forward],
        "backward": [(t.operation, t.nbytes) for t in backward],
        "before the product": main_grad.sent_before,
        "kept rows": kept,
        "error": error(rows.t() @ inputs, half(want.weight.grad, 0)),
        "x": error(x.grad, half(want.x.grad, 0) if sequence_parallel else want.x.grad),
    }


@pytest.mark.parametrize("defers_weight_grad", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_exchange_of_inputs_goes_on_during_the_products(
    sequence_parallel: bool, defers_weight_grad: bool, pool: Pool
) -> None:
    whole = T * B * IN * 8
    gather, scatter, reduce = ("all_gather", whole), ("reduce_scatter", whole), ("all_reduce", whole)
    for seen in pool.run(exchanges, 2, sequence_parallel, defers_weight_grad):
        assert seen["error"] < TOLERANCE and seen["x"] < TOLERANCE
        assert seen["forward"] == ([gather] if sequence_parallel else [])
        if sequence_parallel:
            assert seen["backward"] == ([scatter] if defers_weight_grad else [gather, scatter])
            assert seen["kept rows"] == (T * B // 2 if defers_weight_grad else None)
        else:
            assert seen["backward"] == [reduce] and seen["kept rows"] is None
        # The reduction of dX is under way when dW is computed.
        assert seen["before the product"] == [operation for operation, _ in seen["backward"]]


def megatron_lm_linear() -> dict[str, float]:
    want, errors = Expected(), {}
    weight, bias = half(want.weight, 0).detach(), half(want.bias, 0).detach()
    for name, reduces, sequence_parallel in (("alone", False, False), ("reduced", True, False), ("rows", False, True)):
        x = (half(want.x, 0) if sequence_parallel else want.x.clone()).detach().requires_grad_()
        y = linear_with_grad_accumulation_and_async_allreduce(
            x, weight, bias, False, reduces, sequence_parallel, tp_group=dist.group.WORLD
        )
        (y * half(want.g, -1)).sum().backward()
        expected = half(want.x.grad, 0) if sequence_parallel else want.x.grad
        if name == "alone":
            expected = half(want.g, -1) @ weight
        errors |= {name: error(y.detach(), half(want.y, -1).detach()), name + " x": error(x.grad, expected)}
    return errors


def test_linear_by_megatron_lms_name(pool: Pool) -> None:
    check(pool.run(megatron_lm_linear, 2))


# ---------------------------------------------------------------------------------------------------------------------
# The embedding


def embedding(scatters: bool) -> dict[str, Any]:
    table = values(VOCABULARY, IN, seed=5).requires_grad_()
    ids = torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(6))
    g = values(T, B, IN, seed=7) if scatters else values(B, T, IN, seed=7)
    expected = F.embedding(ids.t() if scatters else ids, table)
    (expected * g).sum().backward()
    layer = VocabParallelEmbedding(
        VOCABULARY,
        IN,
        init_method=nn.init.normal_,
        reduce_scatter_embeddings=scatters,
        config=config(scatters),
        tp_group=dist.group.WORLD,
        vocab_padding_multiple=8,
    )
    name_parameters(layer)
    fill(layer, {"weight": table.detach()})
    output = layer(ids)
    errors: dict[str, Any] = {"y": error(output, half(expected, 0) if scatters else expected)}
    (output * (half(g, 0) if scatters else g)).sum().backward()
    errors |= gradient_errors(layer, {"weight": table.grad}, dist.group.WORLD)
    errors["refused"] = []
    for wrong in (-1, 16):
        try:
            layer.backend.matrices.embedding(torch.tensor([wrong]), layer.weight, layer.tp_group)
        except IndexError:
            errors["refused"].append(wrong)
    return errors


@pytest.mark.parametrize("scatters", [False, True])
def test_embedding(scatters: bool, pool: Pool) -> None:
    results = pool.run(embedding, 2, scatters)
    # An id outside of the whole table is seen by the rank at that end.
    assert [result.pop("refused") for result in results] == [[-1], [16]]
    check(results)
