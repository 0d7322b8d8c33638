"""Times of kernels follow from a GPU's rates, and are those that were measured."""

import dataclasses

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.gpus import gpu_named
from megatron.diagnosis.planning.kernel_time import passes_of, product_seconds
from megatron.diagnosis.planning.work import AttentionWork, Product, Selection, Work

H200 = gpu_named("h200")

# benchmarks/bench.py CELL --floor on one H200: rows, inputs, outputs, milliseconds of the three products
MEASURED = [
    (65536, 768, 2304, 0.379, 0.358, 0.393),
    (65536, 768, 768, 0.135, 0.149, 0.135),
    (65536, 768, 50304, 8.329, 7.460, 7.360),
    (16384, 2048, 576, 0.062, 0.070, 0.073),
    (16384, 512, 4096, 0.126, 0.109, 0.107),
    (16384, 2048, 64, 0.021, 0.023, 0.023),
    (16384, 2048, 3072, 0.317, 0.310, 0.317),
    (16384, 8192, 2048, 0.810, 0.873, 0.815),
    (16384, 2048, 128256, 13.121, 12.825, 12.869),
    (8192, 4096, 28672, 2.834, 2.768, 2.945),
    (8192, 14336, 4096, 1.410, 1.543, 1.511),
]


@pytest.mark.parametrize(("rows", "inputs", "outputs", "forward", "input_gradient", "weight_gradient"), MEASURED)
def test_products(
    rows: int, inputs: int, outputs: int, forward: float, input_gradient: float, weight_gradient: float
) -> None:
    each = Product(rows, inputs, outputs, torch.bfloat16)
    shapes = ((rows, outputs, inputs), (rows, inputs, outputs), (outputs, inputs, rows))
    found = [product_seconds(each, shape, H200, gradient=shape[2] == rows).value * 1e3 for shape in shapes]
    assert found == pytest.approx([forward, input_gradient, weight_gradient], rel=0.2)
    assert sum(found) == pytest.approx(forward + input_gradient + weight_gradient, rel=0.13)


@pytest.mark.parametrize(
    ("call", "milliseconds"),
    [
        (AttentionWork(65536, 512, 12, 64, 64), 1.364),
        (AttentionWork(16384, 2048, 32, 64, 64), 2.421),
        (AttentionWork(16384, 2048, 32, 128, 128), 4.219),
        (AttentionWork(8192, 4096, 32, 128, 128), 3.617),
        (AttentionWork(16384, 2048, 16, 192, 128), 2.848),
    ],
)
def test_attention(call: AttentionWork, milliseconds: float) -> None:
    work = Work()
    work.attention[call] += 1
    found = next(each for each in passes_of(work, H200) if each.kind == "attention")
    assert found.whole.value * 1e3 == pytest.approx(milliseconds, rel=0.08)


def test_selected_keys() -> None:
    """For a layer of the row DSA our kernel takes 4.1 times as long, and before it the indexer chooses keys."""
    plain, selecting = (Work(), Work())
    call = AttentionWork(8192, 4096, 128, 192, 128)
    plain.attention[call] = 1
    selecting.attention[dataclasses.replace(call, selects=True)] = 1
    selecting.selections[Selection(8192, 8192, 64, 128)] = 1
    alone, found = ({each.kind: each for each in passes_of(work, H200)} for work in (plain, selecting))
    assert alone["choice of keys"].whole.value == 0
    assert found["attention"].whole.value == pytest.approx(4.1 * alone["attention"].whole.value, rel=1e-3)
    assert found["attention"].whole.error > alone["attention"].whole.error
    choice = found["choice of keys"]
    seconds = 2 * 8192**2 * 64 * 128 / 532e12 + 170 * 8192**2 / (0.93 * 4.2e12)
    assert choice.forward.value == choice.whole.value == pytest.approx(seconds)


def test_a_product_that_does_not_fill_the_gpu_takes_a_whole_round() -> None:
    few, more = (
        product_seconds(Product(rows, 1024, 1024, torch.bfloat16), (rows, 1024, 1024), H200).value
        for rows in (128, 4096)
    )
    assert more < 3 * few  # 32 times the work: 4 tiles of 132 multiprocessors, or 128


def test_without_a_rate_there_is_no_time() -> None:
    work = Work()
    work.products[Product(16, 16, 16, torch.bfloat16, fp8=True)] += 1
    with pytest.raises(UserError, match="a100-80gb has no rate of fp8 products: leave --fp8-format out"):
        passes_of(work, gpu_named("a100"))


def test_the_error_of_a_rate_is_that_of_the_time() -> None:
    work = Work()
    work.products[Product(8192, 8192, 8192, torch.bfloat16)] += 1
    rough = dataclasses.replace(H200, bf16_products=dataclasses.replace(H200.bf16_products, error=0.3, source="x"))
    found = passes_of(work, rough)[0]
    assert (found.kind, found.whole.error, found.whole.source) == ("products", pytest.approx(0.3), "x")
