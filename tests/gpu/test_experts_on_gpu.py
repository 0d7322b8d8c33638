"""Experts on a GPU: kernels against their definitions, whole layers against a CPU, no step that waits for the host."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import expert_kernels, shared_kernels
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ops.moe import grouped_product_specialized_triton
from megatron.core.ops.moe.grouped_linear import RowGroups, grouped_linear, grouped_product
from megatron.core.ops.moe.grouped_linear_triton import ACCUMULATIONS, grouped_linear_cuda, grouped_product_cuda
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.gpu

SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False, "normalization": "RMSNorm"}
SHARED = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CASES: dict[str, dict[str, Any]] = {
    "swiglu, shared": {**SWIGLU, **SHARED, "moe_shared_expert_overlap": True},
    "biases, few tokens an expert": {"num_moe_experts": 32, "moe_router_topk": 4},
    "sigmoid, latent": {**SWIGLU, **SIGMOID, "moe_latent_size": 32},
    "dropped": {**SWIGLU, "moe_expert_capacity_factor": 0.6},
}


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    "check",
    [
        *("places", "choices", "weights_of_choices", "counted_choices", "routers", "parts_of_numbers"),
        *("moves", "activations", "products", "accumulations", "linears", "biases"),
    ],
)
def test_kernels_equal_their_definitions(check: str) -> None:
    getattr(expert_kernels, check)()


@pytest.mark.parametrize("check", ["shared_outputs", "shared_inputs"])
def test_kernels_beside_shared_experts_equal_their_definitions(check: str) -> None:
    getattr(shared_kernels, check)()


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")


@pytest.mark.usefixtures("hopper")
def test_products_with_specialised_warps_agree_with_float64() -> None:
    expert_kernels.specialized_products()


@pytest.mark.usefixtures("hopper")
def test_specialised_warps_compute_products_of_whole_stages_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, bool]] = []
    compute = grouped_product_specialized_triton.grouped_product_specialized

    def noted(output: Tensor, rows: Tensor, weight: Tensor, bounds: tuple[Tensor, Tensor], transposed: bool) -> None:
        calls.append((rows.shape[1], transposed))
        compute(output, rows, weight, bounds, transposed)

    monkeypatch.setattr(grouped_product_specialized_triton, "grouped_product_specialized", noted)
    sizes = [70, 0, 1, 130]
    for channels, width, dtype in ((128, 192, torch.bfloat16), (192, 96, torch.bfloat16), (128, 128, torch.float16)):
        groups = RowGroups(torch.tensor(sizes, device="cuda"))
        rows = expert_kernels.values(201, channels, dtype=dtype).requires_grad_()
        weight = expert_kernels.values(4, width, channels, dtype=dtype, seed=1).requires_grad_()
        gradient = expert_kernels.values(201, width, dtype=dtype, seed=2)
        output = grouped_linear_cuda(rows, weight, groups)
        found = [output, *torch.autograd.grad(output, [rows, weight], gradient)]
        exact_rows, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (rows, weight))
        exact = grouped_linear(exact_rows, exact_weight, groups)
        expected = [exact, *torch.autograd.grad(exact, [exact_rows, exact_weight], gradient.double())]
        for one, other in zip(found, expected, strict=True):
            assert (one.double() - other).abs().max() <= 2**-8 * other.abs().max(), (channels, width, dtype)
    assert calls == [(128, True), (192, False), (192, True)]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("sizes", [expert_kernels.LARGE, (0,) * 63 + (301,), (0,) * 64], ids=["large", "last", "none"])
@pytest.mark.parametrize("transposed", [True, False])
def test_specialised_warps_give_the_same_bits_at_every_run(transposed: bool, sizes: tuple[int, ...]) -> None:
    first, again = (expert_kernels.multiplied(sizes, 1024, 1024, transposed, behind=37) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.usefixtures("hopper")
def test_a_captured_product_takes_other_numbers_of_rows() -> None:
    counts = torch.tensor([70, 0, 1, 130], device="cuda")
    rows = expert_kernels.values(201, 128, dtype=torch.bfloat16)
    weight = expert_kernels.values(4, 320, 128, dtype=torch.bfloat16, seed=1)
    grouped_product_cuda(rows, weight, RowGroups(counts), True)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grouped_product_cuda(rows, weight, RowGroups(counts), True)
    for _ in range(2):
        counts.copy_(counts.flip(0))
        found.zero_()
        graph.replay()
        assert torch.equal(found, grouped_product_cuda(rows, weight, RowGroups(counts), True))
        agrees = grouped_product(rows.double(), weight.double(), RowGroups(counts), True)
        assert (found.double() - agrees).abs().max() <= 2**-8 * agrees.abs().max()


@pytest.mark.parametrize("widths", [(2048, 2048), (2048, 1024)])
@pytest.mark.parametrize("way", ACCUMULATIONS)
def test_each_way_to_add_weight_gradients_agrees_at_the_sizes_of_a_large_model(
    way: str, widths: tuple[int, int]
) -> None:
    expert_kernels.accumulated(ACCUMULATIONS[way], expert_kernels.LARGE, *widths)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("way", ACCUMULATIONS)
def test_groups_of_any_length_have_right_weight_gradients_and_the_same_bits_at_every_run(
    way: str, factor: float, replaces: bool
) -> None:
    for case in expert_kernels.RAGGED:
        found = [expert_kernels.accumulated(ACCUMULATIONS[way], *case, factor, replaces) for _ in range(2)]
        assert torch.equal(*found), case


def build(device: str, **settings: Any) -> GPTModel:
    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_moe_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 96,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 0.01,
            "moe_z_loss_coeff": 0.001,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "init_method_std": 0.1,
        }
        | settings
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, spec, vocab_size=500, max_sequence_length=64).to(device)


def step(model: GPTModel) -> dict[str, Tensor]:
    ids = torch.randint(500, (2, 65), generator=torch.Generator().manual_seed(1)).to(next(model.parameters()).device)
    loss = model(ids[:, :-1], labels=ids[:, 1:], tokens=Tokens(64, 2, random=RngPosition(5, 3, 8)))
    loss.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gpu_equals_cpu(case: str, grouped: bool, dispatcher: str) -> None:
    for precision, tolerance in (({"fp64": True}, 1e-10), ({}, 1e-4)):
        settings = {**CASES[case], **precision, "moe_grouped_gemm": grouped, "moe_token_dispatcher_type": dispatcher}
        expected, ours = step(build("cpu", **settings)), step(build("cuda", **settings))
        assert expected.keys() == ours.keys()
        for name, value in expected.items():
            assert (ours[name].cpu() - value).abs().max() <= tolerance * value.abs().max(), (name, precision)


@pytest.mark.parametrize("case", CASES)
def test_half_precision_is_as_near_to_float64_as_plain_torch_is(case: str) -> None:
    """Tokens whose experts score almost alike may go elsewhere, so that more than rounding is between the two."""
    narrow = build("cuda", bf16=True, **CASES[case])
    exact = build("cuda", fp64=True, **CASES[case])
    plain = build("cuda", bf16=True, transformer_impl="local", **CASES[case])
    with torch.no_grad():
        for values, rounded in zip(exact.parameters(), narrow.parameters(), strict=True):
            values.copy_(rounded)
    expected = step(exact)
    errors = []
    for model in (narrow, plain):
        found = step(model)
        assert (found["loss"] - expected["loss"]).abs().mean() < 0.02 * expected["loss"].abs().mean()
        parts = [torch.cat([s[n].double().flatten() for n in expected if n != "loss"]) for s in (found, expected)]
        errors.append(float((parts[0] - parts[1]).norm() / parts[1].norm()))
    assert errors[0] < 1.5 * errors[1] + 0.01, errors


@pytest.mark.parametrize("case", [case for case in CASES if case != "dropped"])
def test_a_dropless_step_on_one_rank_does_not_wait_and_is_the_same_at_every_run(case: str) -> None:
    results = []
    for attempt in range(3):  # the first compiles kernels and fills caches
        model = build("cuda", bf16=True, **CASES[case])
        ids = torch.randint(500, (2, 65), generator=torch.Generator().manual_seed(1)).cuda()
        iteration, first = (torch.tensor(number, device="cuda") for number in (3, 8))
        tokens = Tokens(64, 2, random=RngPosition(5, iteration, first))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            model(ids[:, :-1], labels=ids[:, 1:], tokens=tokens).mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    for first_run, again in zip(results[1], results[2], strict=True):
        assert torch.equal(first_run, again)
