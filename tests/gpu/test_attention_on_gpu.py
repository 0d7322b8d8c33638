"""Our own flash attention and torch's flex_attention on a GPU: their numbers are those of the definition in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import flash_agreement

from megatron.core.ops.attention import flash_backward_specialized_triton, flash_backward_triton, flash_triton
from megatron.core.ops.attention.flash_forward_triton import TileSize
from megatron.core.ops.attention.flash_triton import flash_attention_triton
from megatron.core.ops.attention.flex import flex_attention_cuda
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention

pytestmark = pytest.mark.gpu


def test_dropout_bits_are_those_of_the_definition() -> None:
    flash_agreement.bits()


@pytest.fixture(params=["specialised warps", "plain Triton"])
def backward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward with the kernel for Hopper where it applies, and without it."""
    if request.param == "plain Triton":
        monkeypatch.setattr(flash_backward_triton, "gluon_kernel", lambda name: None)


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("name", flash_agreement.CASES)
def test_outputs_and_gradients_are_those_of_the_definition(name: str) -> None:
    flash_agreement.attention_of(name)


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("kind", ["single tokens", "one", "many, some empty", "tail"])
def test_odd_documents(kind: str) -> None:
    flash_agreement.documents(kind)


WITHOUT_DROPOUT = [name for name, case in flash_agreement.CASES.items() if not case.variant.dropout]


@pytest.mark.parametrize("name", [name for name in WITHOUT_DROPOUT if "bias" not in name])
def test_flex_attention_gives_the_numbers_of_the_definition(name: str) -> None:
    flash_agreement.attention_of(name, flex_attention_cuda)


SMALL = TileSize(64, 64, 4, 2)
FORMS = {
    "rows of queries": replace(SMALL, by_query=True),
    "copied tiles, sums begin with what is subtracted": replace(SMALL, bulk_loads=True, folds=True),
    "all, longest first": replace(SMALL, num_stages=3, bulk_loads=True, by_query=True, folds=True, heads_first=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["causal, dropped", "chunks", "packed, dropped", "relative bias, packed"])
def test_forms_of_the_kernels(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tiles in ("_FORWARD_TILES", "_BACKWARD_TILES"):
        monkeypatch.setattr(flash_triton, tiles, {256: FORMS[form]})
        monkeypatch.setattr(flash_triton, tiles + "_WITH_DROPOUT", {})
    flash_agreement.attention_of(name)


def test_heads_that_are_computed_in_turns_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_agreement.heads_in_turns(monkeypatch)


@pytest.mark.usefixtures("backward")
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
    plain = flash_backward_specialized_triton.backward_specialized

    def noted(*arguments: Any) -> Any:
        widths.append(arguments[1].shape[3])
        return plain(*arguments)

    monkeypatch.setattr(flash_backward_specialized_triton, "backward_specialized", noted)
    for name in ("causal", "causal, wide", "window, packed, wide", "causal, dropped", "window, capped"):
        flash_agreement.attention_of(name)
    assert widths == [64, 128, 128]


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
