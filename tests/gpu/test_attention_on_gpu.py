"""Our own flash attention on a GPU: its numbers are those of the definition in float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import flash_agreement

from megatron.core.ops.attention import (
    flash_backward_specialized_triton,
    flash_backward_triton,
    flash_forward_specialized_triton,
    flash_forward_triton,
    flash_triton,
)
from megatron.core.ops.attention.blocks import BlockCall, BlockOffsets, block_attention
from megatron.core.ops.attention.flash_forward_triton import TileSize
from megatron.core.ops.attention.flash_triton import flash_attention_triton
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention

pytestmark = pytest.mark.gpu


def test_dropout_bits_are_those_of_the_definition() -> None:
    flash_agreement.bits()


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward without the kernels for Hopper."""
    for module in (flash_forward_triton, flash_backward_triton):
        monkeypatch.setattr(module, "gluon_kernel", lambda name: None)


@pytest.fixture(params=["specialised warps", "plain Triton"])
def kernels(request: pytest.FixtureRequest) -> None:
    """Forward and backward with the kernels for Hopper where they apply, and without them."""
    if request.param == "plain Triton":
        request.getfixturevalue("plain_kernels")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", flash_agreement.CASES)
def test_outputs_and_gradients_are_those_of_the_definition(name: str) -> None:
    flash_agreement.attention_of(name)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["single tokens", "one", "many, some empty", "tail"])
def test_odd_documents(kind: str) -> None:
    flash_agreement.documents(kind)


SMALL = TileSize(64, 64, 4, 2)
FORMS = {
    "rows of queries": replace(SMALL, by_query=True),
    "copied tiles, sums begin with what is subtracted": replace(SMALL, bulk_loads=True, folds=True),
    "all, longest first": replace(SMALL, num_stages=3, bulk_loads=True, by_query=True, folds=True, heads_first=True),
}


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["causal, dropped", "chunks", "packed, dropped", "relative bias, packed"])
def test_forms_of_the_kernels(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tiles in ("_FORWARD_TILES", "_BACKWARD_TILES"):
        monkeypatch.setattr(flash_triton, tiles, {256: FORMS[form]})
        monkeypatch.setattr(flash_triton, tiles + "_WITH_DROPOUT", {})
    flash_agreement.attention_of(name)


def test_heads_that_are_computed_in_turns_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_agreement.heads_in_turns(monkeypatch)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_merge_to_whole_rows(packed: bool, drops: bool) -> None:
    flash_agreement.blocks(packed, drops)


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")


@pytest.mark.usefixtures("hopper")
def test_specialised_warps_compute_heads_of_64_and_128_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    compute = flash_backward_specialized_triton.backward_specialized

    def noted(*arguments: Any) -> Any:
        widths.append(arguments[1].shape[3])
        return compute(*arguments)

    monkeypatch.setattr(flash_backward_specialized_triton, "backward_specialized", noted)
    plain = ("causal", "causal, wide", "window, packed, wide")
    dropped = ("causal, dropped", "causal, wide, dropped", "window, packed, dropped")
    for name in (*plain, *dropped, "window, capped"):
        flash_agreement.attention_of(name)
    assert widths == [64, 128, 128, 64, 128, 64]


@pytest.fixture
def deterministic(hopper: None) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SPECIALIZED = (
    "causal", "causal, wide", "bidirectional, wide, more keys than queries", "window, packed, wide", "causal, dropped",
    "window, packed, dropped",
)  # fmt: skip


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", SPECIALIZED)
def test_sums_in_order_are_those_of_the_definition(name: str) -> None:
    flash_agreement.attention_of(name)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_with_sums_in_order_merge_to_whole_rows(packed: bool) -> None:
    flash_agreement.blocks(packed, False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", ["single tokens", "one", "many, some empty", "tail"])
def test_odd_documents_with_sums_in_order(kind: str) -> None:
    flash_agreement.documents(kind)


def gradients_of_queries(width: int, packed: bool) -> list[torch.Tensor]:
    """Gradients of queries of twenty equal calls, large enough that programs overtake each other."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(4096, 2 - packed, heads, width, generator=generator, device="cuda").bfloat16().requires_grad_()
        for heads in (16, 4, 4)
    )
    edges = torch.tensor([0, 700, 701, 3000, 4096], dtype=torch.int32, device="cuda") if packed else None
    call = AttentionCall(cu_seqlens=edges, max_seqlen=4096)
    output = flash_attention_triton(query, key, value, AttentionVariant(width**-0.5, True), call)
    gradient = torch.randn(output.shape, generator=generator, device="cuda").bfloat16()
    return [torch.autograd.grad(output, query, gradient, retain_graph=True)[0] for _ in range(20)]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_sums_in_order_are_equal_in_every_call(width: int, packed: bool) -> None:
    first, *others = gradients_of_queries(width, packed)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.usefixtures("hopper")
def test_other_sums_differ_from_call_to_call() -> None:
    first, *others = gradients_of_queries(128, False)
    assert not all(torch.equal(first, other) for other in others)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
def test_specialised_warps_take_heads_at_any_place(width: int, dtype: torch.dtype) -> None:
    """Parts of one packed tensor, rows that do not begin at multiples of 16 bytes, and a gradient that repeats one."""
    generator = torch.Generator("cuda").manual_seed(0)
    packed = torch.randn(300, 2, 2, 4, width, generator=generator, device="cuda").to(dtype)
    odd = torch.randn(300, 2, 2, width + 1, generator=generator, device="cuda").to(dtype)[..., 1:]
    variant, call = AttentionVariant(0.1, True), AttentionCall()
    query, key = packed[:, :, :, :2].flatten(2, 3), packed[:, :, :, 2]
    row = torch.randn(width, generator=generator, device="cuda").to(dtype).expand(query.shape)
    for value, gradient in ((packed[:, :, :, 3], query * 0.5), (odd, query * 0.5), (odd, row)):
        found = []
        for function, type_ in ((attention, torch.float64), (flash_attention_triton, dtype)):
            leaves = [heads.detach().to(type_).requires_grad_() for heads in (query, key, value)]
            found.append(torch.autograd.grad(function(*leaves, variant, call), leaves, gradient.to(type_)))
        for exact, ours in zip(*found, strict=True):
            assert (ours.double() - exact).abs().max() < flash_agreement.TOLERANCE * exact.abs().max()


@pytest.mark.parametrize("place", ["one tensor for all", "tensors of their own"])
@pytest.mark.parametrize("widths", [(24, 16), (24, 8), (16, 24), (40, 40), (36, 100), (72, 72), (8, 130)])
def test_heads_of_any_width_at_any_place(widths: tuple[int, int], place: str) -> None:
    """Once a product read beyond shared memory, where the 16 channels of values began at multiples of 88."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [2 * widths[0], widths[0], widths[1]]
    packed = torch.randn(1000, 2, sum(sizes), generator=generator, device="cuda").bfloat16()
    gradient = torch.randn(1000, 2, 2, widths[1], generator=generator, device="cuda").bfloat16()
    parts = [part.unflatten(2, (-1, w)) for part, w in zip(packed.split(sizes, 2), (widths[0], *widths), strict=True)]
    if place == "tensors of their own":
        parts = [part.contiguous() for part in parts]
    for window in (None, (200, 0)):
        variant, found = AttentionVariant(0.2, True, window), []
        for function, dtype in ((attention, torch.float64), (flash_attention_triton, torch.bfloat16)):
            leaves = [part.detach().to(dtype).requires_grad_() for part in parts]
            output = function(*leaves, variant, AttentionCall())
            found.append([output.detach(), *torch.autograd.grad(output, leaves, gradient.to(dtype))])
        for exact, ours in zip(*found, strict=True):
            assert ours.shape == exact.shape
            assert (ours.double() - exact).abs().max() < flash_agreement.TOLERANCE * exact.abs().max()


OFFSETS = {
    "causal": BlockOffsets(0, 0, None, 0),
    "all keys": BlockOffsets(0, 0, None, None),
    "window": BlockOffsets(0, 0, 150, 0),
    "window on both sides": BlockOffsets(0, 0, 20, 300),
    "first queries see nothing": BlockOffsets(0, 0, None, -140),
    "last queries see nothing": BlockOffsets(0, 0, -400, None),
    "a block behind its keys": BlockOffsets(1100, 100, None, None),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OFFSETS)
def test_specialised_warps_give_outputs_and_lse_of_the_definition_and_the_same_bits_at_every_run(
    name: str, packed: bool, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return compute(*args)

    compute = flash_forward_specialized_triton.forward_specialized
    monkeypatch.setattr(flash_forward_specialized_triton, "forward_specialized", counted)
    # A program computes several tiles.
    monkeypatch.setattr(flash_forward_specialized_triton, "num_multiprocessors", lambda device: 5)
    monkeypatch.setattr(flash_forward_specialized_triton, "_CACHED", 1 << 18)  # two heads at a time, of six
    sq, sk, b = 700, 900, 1 if packed else 2
    generator = torch.Generator("cuda").manual_seed(1)
    query, key, value = (
        torch.randn(length, b, heads, width + 16, device="cuda", generator=generator).to(dtype)[..., :width]
        for length, heads in ((sq, 6), (sk, 3), (sk, 3))
    )
    cuts = torch.tensor([0, 1, 130, 256, 256, 500, 1000, 1111, 1800], dtype=torch.int32, device="cuda")
    call = BlockCall(cuts if packed else None, 689)
    variant = AttentionVariant(0.125, False)
    output, lse = flash_triton.flash_block_attention_triton(query, key, value, OFFSETS[name], variant, call)
    exact, exact_lse = block_attention(query.double(), key.double(), value.double(), OFFSETS[name], variant, call)
    assert output.dtype is dtype and lse.dtype is torch.float32 and torch.equal(lse.isinf(), exact_lse.isinf())
    # In some calls with documents no query sees a key: all outputs are 0.
    assert (output.double() - exact).abs().max() <= 4e-3 * exact.abs().max()
    known = ~exact_lse.isinf()
    if known.any():
        assert (lse.double() - exact_lse)[known].abs().max() < 2e-6 * exact_lse[known].abs().max()
    for _ in range(20):
        again = flash_triton.flash_block_attention_triton(query, key, value, OFFSETS[name], variant, call)
        assert torch.equal(again[0], output) and torch.equal(again[1], lse)
    assert len(calls) == 21


def test_a_cuda_graph_repeats_forward_and_backward() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value, gradient = (
        torch.randn(400, 1, 4, 64, generator=generator, device="cuda").bfloat16().requires_grad_() for _ in range(4)
    )
    variant, call = AttentionVariant(0.1, True), AttentionCall()

    def step() -> tuple[torch.Tensor, ...]:
        output = flash_attention_triton(query, key, value, variant, call)
        return torch.autograd.grad(output, (query, key, value), gradient)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        query.normal_()
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        assert (found - expected).abs().max() < 1e-2 * expected.abs().max()
