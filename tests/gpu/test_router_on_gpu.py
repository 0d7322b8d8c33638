"""Routers on a GPU: the experts that a CPU picks, and nothing that waits for the host."""

from typing import Any

import pytest
import torch

from megatron.core.ops.moe.routing import bfloat16_parts, router_logits
from megatron.core.ops.moe.routing_triton import bfloat16_parts_triton
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.gpu

S, B, H, EXPERTS = 256, 2, 64, 32

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2],
        "moe_z_loss_coeff": 0.1,
    },
    "sigmoid, groups, bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk": 8,
    },
    "capacity": {"moe_expert_capacity_factor": 0.75, "moe_router_pre_softmax": True},
    "noise": {"moe_input_jitter_eps": 0.1, "moe_router_force_load_balancing": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
}


def routed(device: str, fields: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    config = TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, num_moe_experts=EXPERTS, add_bias_linear=False, fp64=True,
        use_cpu_initialization=True, **fields,
    )  # fmt: skip
    router = TopKRouter(config, layer_number=1)
    generator = torch.Generator().manual_seed(0)
    router.weight.data = torch.randn(EXPERTS, H, generator=generator, dtype=torch.float64)
    router.to(device)
    hidden = torch.randn(S * B, H, generator=generator, dtype=torch.float64).to(device)
    inputs = LayerInputs(Tokens(S, B, random=RngPosition(1, torch.tensor(3, device=device))))
    factors = torch.arange(config.moe_router_topk, dtype=torch.float64).to(device) + 1
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        routing = router.route(hidden, inputs)
        (routing.weights * factors).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert router.weight.grad is not None
    return routing, router.weight.grad.cpu()


@pytest.mark.parametrize("kind", KINDS)
def test_it_routes_as_a_cpu_does_and_waits_for_nothing(kind: str) -> None:
    expected, gradient = routed("cpu", KINDS[kind])
    found, gradient_found = routed("cuda", KINDS[kind])
    assert torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.weights.cpu(), expected.weights, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient_found, gradient, rtol=1e-9, atol=1e-10)
    if expected.kept is not None:
        assert torch.equal(found.kept.cpu(), expected.kept) and not expected.kept.all()


@pytest.mark.parametrize("parts", [bfloat16_parts, bfloat16_parts_triton])
def test_float32_products_of_bfloat16_numbers_are_exact_on_tensor_cores(parts: Any) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(rows, 512, device="cuda", generator=generator).bfloat16() for rows in (700, 96))
    upstream = torch.randn(700, 96, device="cuda", generator=generator)
    hidden.requires_grad_()
    parameter = torch.nn.Parameter(weight)
    totals = torch.zeros(96, 512, device="cuda")

    class Total:
        def add_grouped_product(self, left: torch.Tensor, right: torch.Tensor, accumulate: Any) -> None:
            accumulate(totals, left, right)

    parameter.main_grad_accumulator = Total()  # type: ignore[attr-defined]
    logits = router_logits(hidden, parameter, None, torch.float32, parts)
    logits.backward(upstream)
    assert hidden.grad is not None
    exact = hidden.double(), weight.double(), upstream.double()
    for found, expected, limit in (
        (logits, exact[0] @ exact[1].t(), 5e-6),
        (totals, exact[2].t() @ exact[0], 5e-6),
        (hidden.grad, exact[2] @ exact[1], 4e-3),  # rounded to bfloat16
    ):
        assert (found.double() - expected).norm() <= limit * expected.norm()
