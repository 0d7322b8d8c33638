"""Compares kernels of experts with their definitions. Runs in its own process, with TRITON_INTERPRET=1 or on a GPU."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from triton.runtime.interpreter import InterpreterBuilder

from megatron.core.backends import LOCAL
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ops.activation import Activation, gelu_erf, gelu_tanh, quick_gelu, squared_relu, weighted_activation
from megatron.core.ops.moe.grouped_linear import RowGroups, grouped_bias, grouped_linear
from megatron.core.ops.moe.grouped_linear_triton import (
    ACCUMULATIONS,
    Accumulation,
    accumulate_grouped_product_triton,
    grouped_bias_cuda,
    grouped_linear_cuda,
)
from megatron.core.ops.moe.permute import ChoiceNumbers, permute, unpermute
from megatron.core.ops.moe.permute_triton import ChoiceNumbersTriton, permute_triton, unpermute_triton
from megatron.core.ops.moe.routing import RoutingRule, best, bfloat16_parts, choose_and_count, choose_experts
from megatron.core.ops.moe.routing_triton import (
    best_triton,
    bfloat16_parts_triton,
    choose_and_count_triton,
    choose_experts_triton,
)
from megatron.core.ops.moe.weighted_activation_triton import keeps_only_arguments, weighted_activation_triton
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.recompute import recompute_parts, recomputed_modules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_CPU = DEVICE.type == "cpu"
_UNIT = {torch.float32: 2e-6, torch.float64: 1e-14, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""About one unit in the last place of each type. Triton's interpreter truncates to bfloat16 instead of rounding."""


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def agree(ours: Tensor, expected: Tensor, units: float, what: object) -> None:
    assert ours.dtype is expected.dtype and ours.shape == expected.shape, what
    scale = expected.abs().max().double() if expected.numel() else torch.tensor(1.0)
    error = (ours.double() - expected.double()).abs().max() if expected.numel() else torch.tensor(0.0)
    assert scale > 0 and error <= units * _UNIT[ours.dtype] * scale, (what, float(error / scale))


def moves() -> None:
    for dtype, width in ((torch.float32, 70), (torch.bfloat16, 2100), (torch.float64, 1), (torch.float32, 1)):
        numbers = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:3] for i in range(9)])
        kept = torch.rand(9, 3, generator=torch.Generator().manual_seed(1)) < 0.7
        kept[4] = False  # a token without an expert
        for mask in (None, kept.to(DEVICE)):
            rows = 27 if mask is None else int(mask.sum())
            groups = numbers.to(DEVICE)
            copies, _ = ChoiceNumbers(groups if mask is None else torch.where(mask, groups, -1), 6).copies(rows)
            compare(permute, permute_triton, values(9, width, dtype=dtype), copies)
            compare(unpermute, unpermute_triton, values(rows, width, dtype=dtype), copies)
        order, _ = ChoiceNumbers(numbers[:7, :1].to(DEVICE), 6).copies(7)
        compare(permute, permute_triton, values(7, width, dtype=dtype), order)
        compare(unpermute, unpermute_triton, values(7, width, dtype=dtype), order)


def places() -> None:
    """Checks more choices and more groups than one program counts at once, groups without choices, choices without a
    group, groups that are left out, and groups in another order."""
    for tokens, k, groups, share in ((9, 3, 6, 1.0), (250, 4, 40, 0.5), (300, 1, 3, 1.0), (300, 2, 300, 0.0)):
        generator = torch.Generator().manual_seed(tokens)
        numbers = torch.rand(tokens, groups, generator=generator).argsort(1)[:, :k].to(torch.int32)
        numbers = torch.where(torch.rand(tokens, k, generator=generator) < share, numbers, -1)
        here = torch.randperm(groups, generator=generator)[: groups // 2 + 1]
        counts = torch.bincount(numbers[numbers >= 0], minlength=groups)
        first = torch.full((groups,), -1).index_put((here,), counts[here].cumsum(0) - counts[here])
        for begin, rows in ((None, int(counts.sum())), (first, int(counts[here].sum()))):
            found = []
            for kind in (ChoiceNumbers, ChoiceNumbersTriton):
                numbered = kind(numbers.to(DEVICE), groups)
                assert torch.equal(numbered.counts.cpu(), counts)
                found.append(numbered.copies(rows, None if begin is None else begin.to(DEVICE)))
            expected, ours = found
            assert torch.equal(ours[0].places, expected[0].places), (tokens, k, groups, share)
            assert torch.equal(ours[0].source, expected[0].source) and torch.equal(ours[1], expected[1])


def compare(definition: Callable[..., Tensor], kernel: Callable[..., Tensor], inputs: Tensor, copies: object) -> None:
    results = []
    for function in (definition, kernel):
        leaf = inputs.clone().requires_grad_()
        output = function(leaf, copies)
        output.backward(values(*output.shape, dtype=output.dtype, seed=3))
        results.append((output.detach(), leaf.grad))
    for expected, ours in zip(*results, strict=True):
        agree(ours, expected, 1.0, (definition.__name__, inputs.dtype, inputs.shape))


def choices() -> None:
    """Checks the best scores to the bit against a CPU's: equal scores, zeros of both signs, NaN, infinities, all of the
    scores."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for tokens, width, count in ((70, 64, 8), (5, 1, 1), (3, 7, 7), (9, 100, 3), (2, 1000, 22), (0, 8, 2)):
            scores = (values(tokens, width, dtype=torch.float32, seed=width) * 4).round().div(4).to(dtype)
            if dtype is torch.float64:
                scores += values(tokens, width, dtype=dtype, seed=1) * 1e-12  # equal in float32
            chosen_rightly(scores, count)
            special = torch.tensor([0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45])
            picked = torch.randint(8, (tokens, width), generator=torch.Generator().manual_seed(2))
            chosen_rightly(special[picked].to(DEVICE, dtype), count)
    chosen_rightly(torch.zeros(3, 3000, device=DEVICE), 2)
    chosen_rightly(torch.tensor([[1, 0, 1]], dtype=torch.int8, device=DEVICE), 2)
    chosen_rightly(values(6, 8).t(), 2)
    chosen_rightly(torch.full((4, 8), float("-inf"), device=DEVICE), 3)


def chosen_rightly(scores: Tensor, count: int) -> None:
    expected, ours = best(scores.cpu(), count), best_triton(scores, count)
    assert ours.dtype is expected.dtype and torch.equal(ours.cpu(), expected), (scores.dtype, scores.shape, count)


def weights_of_choices() -> None:
    """Checks experts and weights, and the gradient of the logits, against the definition in float64."""
    plain = RoutingRule(3)
    for dtype, tokens, width, rule, bias in (
        (torch.bfloat16, 70, 64, RoutingRule(8), None),
        (torch.float32, 33, 20, RoutingRule(3, factor=2.5), None),
        (torch.float32, 5, 1, RoutingRule(1), None),
        (torch.float64, 6, 20, plain, None),
        (torch.float32, 6, 20, RoutingRule(3, scores_first=True, renormalises=True), None),
        (torch.float32, 6, 20, RoutingRule(4, "sigmoid", num_groups=4, groups_kept=2, group_score_of=2), values(20)),
    ):
        found = []
        for function, wide in ((choose_experts, True), (choose_experts_triton, False)):
            logits = values(tokens, width, dtype=dtype, seed=3).requires_grad_()
            experts, weights = function(logits.double() if wide else logits, rule, bias)
            weights.backward(values(*weights.shape, seed=4).to(weights.dtype))
            found.append((experts, weights.detach(), logits.grad))
        (expected, exact, exact_gradient), (experts, weights, gradient) = found
        assert torch.equal(experts, expected), (dtype, rule)
        agree(weights, exact.to(weights.dtype), 4.0, (dtype, rule))
        if rule.topk > 1:
            agree(gradient, exact_gradient, 4.0, (dtype, rule))
        else:
            assert not gradient.any()
    given = torch.tensor([[1, 0], [2, 3]], device=DEVICE)
    experts, weights = choose_experts_triton(values(2, 4), RoutingRule(2), None, given)
    assert experts is given and torch.equal(weights, choose_experts(values(2, 4), RoutingRule(2), None, given)[1])
    assert choose_experts_triton(values(0, 4), plain)[1].shape == (0, 3)
    logits = values(3, 8)
    logits[0, 2] = float("nan")
    assert choose_experts_triton(logits, plain)[1].isnan().sum(1).tolist() == [3, 0, 0]


def counted_choices() -> None:
    """Checks choices with sums and counts, and the gradient of the logits through weights, sums or both, against the
    definition in float64; several blocks of tokens of a program, real and other tokens."""
    for dtype, tokens, width, rule, padded, used in (
        (torch.float32, 9001 if DEVICE.type == "cuda" else 301, 500, RoutingRule(3, factor=2.5), True, (0, 1)),
        (torch.bfloat16, 70, 64, RoutingRule(8), True, (0, 1)),
        (torch.float32, 33, 20, RoutingRule(3), True, (1,)),
        (torch.float32, 33, 20, RoutingRule(3), False, (0,)),
        (torch.float32, 6, 20, RoutingRule(3, scores_first=True), True, (0, 1)),
        (torch.float64, 6, 20, RoutingRule(3), False, (0, 1)),
    ):
        real, found = (torch.arange(tokens) % 3 != 1).to(DEVICE) if padded else None, []
        for function, wide in ((choose_and_count, True), (choose_and_count_triton, False)):
            logits = values(tokens, width, dtype=dtype, seed=3).requires_grad_()
            choice = function(logits.double() if wide else logits, rule, None, real)
            assert choice.score_sums is not None
            both = (
                (choice.weights * values(*choice.weights.shape, seed=4)).sum(),
                choice.score_sums @ (values(width, seed=5).to(choice.score_sums.dtype)),
            )
            sum(both[number] for number in used).backward()
            found.append((choice, logits.grad))
        (expected, exact_gradient), (ours, gradient) = found
        assert torch.equal(ours.experts, expected.experts) and torch.equal(ours.counts, expected.counts), (dtype, rule)
        for own, exact in ((ours.weights, expected.weights), (ours.score_sums, expected.score_sums)):
            agree(own.detach(), exact.detach().to(own.dtype), 4.0, (dtype, rule))
        agree(gradient, exact_gradient, 4.0, (dtype, rule, used))
    empty = choose_and_count_triton(values(0, 4), RoutingRule(2))
    assert empty.score_sums.tolist() == [0.0] * 4 and empty.counts.tolist() == [0] * 4


KERNELS_OF_ROUTERS = {
    "best": best_triton,
    "choose_experts": choose_experts_triton,
    "choose_and_count": choose_and_count_triton,
}


def routers() -> None:
    """Checks a router with the kernels against one without: experts, weights, counts and the weight's gradient."""
    cases: list[dict[str, Any]] = [
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 0.3},
        {"moe_expert_capacity_factor": 0.8, "moe_aux_loss_coeff": 0.0},
    ]
    for fields in cases:
        with_kernels = LOCAL.with_operations(experts=KERNELS_OF_ROUTERS)
        found = []
        for backend in (LOCAL, with_kernels):
            sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 6}
            config = TransformerConfig(**sizes, moe_router_topk=2, add_bias_linear=False, **fields)
            router = TopKRouter(config, layer_number=1, backend=backend).to(DEVICE)
            with torch.no_grad():
                router.weight.copy_(values(6, 8))
            routing = router.route(values(20, 8, seed=1), LayerInputs(Tokens(10, 2)))
            (routing.weights * values(20, 2, seed=2)).sum().backward()
            assert routing.counts is not None
            found.append((routing.experts, routing.counts, routing.weights.detach(), router.weight.grad))
        (experts, numbers, *exact), (own_experts, own_numbers, *own) = found
        assert torch.equal(own_experts, experts) and torch.equal(own_numbers, numbers), fields
        for ours, expected in zip(own, exact, strict=True):
            agree(ours, expected, 10.0, fields)


def parts_of_numbers() -> None:
    """Checks that parts hold all bits of float32, also of a view and of none."""
    for numbers in (values(37, 70) * 1e-3, values(9, 5, seed=1).t(), values(0, 4)):
        parts = bfloat16_parts_triton(numbers)
        assert parts.dtype is torch.bfloat16 and parts.shape == (numbers.shape[0], 3 * numbers.shape[1])
        if numbers.numel():
            sums = parts.double().view(numbers.shape[0], 3, -1).sum(1)
            assert ((sums - numbers.double()).abs() <= 2.0**-23 * numbers.abs()).all()
            if numbers.is_cuda:  # the interpreter truncates
                assert torch.equal(parts, bfloat16_parts(numbers))


def activations() -> None:
    kinds = [F.silu, gelu_tanh, gelu_erf, F.gelu, quick_gelu, squared_relu, F.relu]
    chosen = [Activation(kind, gated) for kind in kinds for gated in (False, True)]
    chosen.append(Activation(F.silu, True, clamp=0.5, up_offset=1.0))
    for number, activation in enumerate(chosen):
        for dtype in (torch.float32, torch.bfloat16) if number in (1, 6) else (torch.float32,):
            for ffn in (5, 1100) if number == 1 else (5,):
                activated(activation, dtype, ffn)


def activated(activation: Activation, dtype: torch.dtype, ffn: int) -> None:
    results = []
    plain = values(2, 3, ffn * (2 if activation.gated else 1), dtype=dtype, seed=4)  # without router weights
    for function in (weighted_activation, weighted_activation_triton):
        product = values(6, ffn * (2 if activation.gated else 1), dtype=dtype).requires_grad_()
        weights = values(6, seed=1).requires_grad_()
        # Both are compared with the definition in float64.
        wide = [product.double(), weights.double()] if function is weighted_activation else [product, weights]
        output = function(wide[0], None, wide[1], activation)
        output.backward(values(6, ffn, dtype=dtype, seed=2).to(output.dtype))
        leaf = plain.clone().requires_grad_()
        wide_leaf = leaf.double() if function is weighted_activation else leaf
        unweighted = function(wide_leaf, None, None, activation)
        unweighted.backward(values(2, 3, ffn, dtype=dtype, seed=5).to(unweighted.dtype))
        results.append(
            (output.detach().to(dtype), product.grad, weights.grad, unweighted.detach().to(dtype), leaf.grad)
        )
    for expected, ours in zip(*results, strict=True):
        agree(ours, expected, 4.0, (activation, dtype, ffn))


def nan_inputs() -> None:
    """Checks that NaN stays NaN where a maximum could hide it."""
    for activation in (Activation(F.relu), Activation(squared_relu), Activation(F.silu, True, 0.5, 1.0)):
        product = values(3, 10)
        product[0, 1] = product[1, 8] = float("nan")
        expected, ours = (f(product, None, None, activation) for f in (weighted_activation, weighted_activation_triton))
        assert torch.equal(ours.isnan(), expected.isnan()) and ours.isnan().sum() == 2, activation


def recomputed_activation() -> None:
    """Checks that an MLP without its activation's result has the same gradients, and that one more kernel computes it:
    the kernel keeps nothing but its arguments, which are kept anyway."""
    found = []
    for way in ({}, {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]}):
        calls: list[int] = []

        def counted(*arguments: Any, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            return weighted_activation_triton(*arguments)

        counted.keeps_only_arguments = keeps_only_arguments  # type: ignore[attr-defined]
        backend = LOCAL.with_operations(experts={"weighted_activation": counted})
        sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "hidden_dropout": 0.0}
        kind: dict[str, Any] = {"gated_linear_unit": True, "add_bias_linear": False}
        config = TransformerConfig(**sizes, **kind, **way)
        parts = get_gpt_layer_local_spec().submodules
        parts = TransformerLayerSubmodules(mlp=parts.mlp, mlp_bda=parts.mlp_bda)
        layer = TransformerLayer(config, parts, backend=backend).to(DEVICE)
        with torch.no_grad():
            for number, parameter in enumerate(layer.parameters()):
                parameter.copy_(values(*parameter.shape, seed=number))
        recompute_parts(layer, recomputed_modules(config))
        hidden = values(6, 8).requires_grad_()
        layer(hidden, LayerInputs(Tokens(6, 1))).backward(values(6, 8, seed=9))
        found.append([hidden.grad, *(parameter.grad for parameter in layer.parameters()), len(calls)])
    assert all(map(torch.equal, found[0][:-1], found[1][:-1])) and len(found[0]) == 4
    assert [one[-1] for one in found] == [1, 2]


def products() -> None:
    """Checks accumulated weight gradients: several tiles per matrix, groups without rows, partly filled tiles."""
    sizes = [70, 0, 1, 130, 0]
    # Triton's interpreter multiplies bfloat16 values as if they were integers.
    for dtype, out_width, in_width in (
        (torch.float16, 40, 24),
        (torch.float16, 20, 12),
        (torch.float16 if ON_CPU else torch.bfloat16, 264, 16),
        (torch.float32, 8, 8),
    ):
        groups = RowGroups(torch.tensor(sizes, device=DEVICE))
        dy, x = values(201, out_width, dtype=dtype), values(201, in_width, dtype=dtype, seed=1)
        before = values(5, out_width, in_width, seed=2)
        total = before.clone()
        accumulate_grouped_product_triton(total, dy, x, groups)
        expected = before.double()
        for number, start in ((0, 0), (2, 70), (3, 71)):
            expected[number] += dy[start:][: sizes[number]].double().t() @ x[start:][: sizes[number]].double()
        agree(total, expected.float(), 40.0, ("weight gradients", dtype))
        assert torch.equal(total[[1, 4]], before[[1, 4]])


def specialized_products() -> None:
    """Checks products by warps with different tasks: tiles whose last rows belong to the next expert, experts without
    rows, rows of no expert, columns behind the last one, many experts."""
    for transposed in (True, False):
        multiplied((1, 0, 129, 128, 65, 300, 0), 192, 328, transposed, behind=3)
    specialized_product_of_many_experts()


def specialized_product_of_many_experts() -> None:
    for repeats in (80, 160):
        multiplied((3, 0, 200) * repeats, 64, 256, True)


def multiplied(sizes: tuple[int, ...], channels: int, width: int, transposed: bool, behind: int = 0) -> Tensor:
    """Compares a product of the kernel with specialised warps with float64, number by number. The rows behind those of
    the experts are NaN. Returns the product."""
    from megatron.core.ops.moe import grouped_product_specialized_triton as specialized

    groups, number = RowGroups(torch.tensor(sizes, device=DEVICE)), sum(sizes)
    rows = values(number + behind, channels, dtype=torch.bfloat16)
    rows[number:] = float("nan")
    shape = (width, channels) if transposed else (channels, width)
    weight = values(len(sizes), *shape, dtype=torch.bfloat16, seed=1)
    assert specialized.takes(rows, weight)
    found = rows.new_full((number + behind, width), 7.0)
    specialized.grouped_product_specialized(found, rows, weight, groups.bounds, transposed)
    assert bool((found[number:] == 7.0).all())
    for part, left, right in zip(found[:number].split(sizes), rows[:number].split(sizes), weight, strict=True):
        exact = left.double() @ (right.t() if transposed else right).double()
        # Rounding to bf16, and sums in float32 that are rounded less than their numbers are large.
        allowed = exact.abs() * 2**-8 + channels**0.5 * 2**-12
        assert bool(((part.double() - exact).abs() <= allowed).all()), (sizes, channels, width, transposed)
    return found[:number]


def _add_in_bulk(builder: Any, kind: Any, tiles: Any, value: Any, indices: Any) -> None:
    """Adds a tile, as the copy engine does."""
    defaults = len(inspect.signature(builder.create_descriptor_load).parameters) - 2
    before = builder.create_descriptor_load(tiles, indices, *[None] * defaults)
    builder.create_descriptor_store(tiles, type(value)(before.data + value.data, value.dtype), indices)


if not hasattr(InterpreterBuilder, "create_descriptor_reduce"):  # Triton's interpreter does not have it
    InterpreterBuilder.create_descriptor_reduce = _add_in_bulk

LARGE = (0, 1, 127, 129, 8191, *[1000, 3000] * 29, 6624)
"""Rows of each expert of MOE64, 131,072 in all."""
RAGGED: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((256, 256), 128, 256, 0),
    ((4096, 4096, 4096), 384, 512, 0),
    ((4096, 0, 0, 2048, 0), 384, 512, 0),
    ((300, 0, 1, 1000, 64, 77), 2048, 1024, 0),
    ((63, 65, 64, 200), 384, 512, 0),
    ((63, 70, 64, 33), 128, 256, 40),
    ((70, 0, 1, 130, 64), 128, 24, 0),
    ((70, 0, 1, 130, 64, 0), 128, 272, 5),
    ((0, 0, 5), 256, 256, 1),
)
"""Rows of each expert, outputs, inputs, and rows behind the last expert: whole stages, groups without rows or with a
part of a stage, tiles with columns behind the last input."""


def accumulations() -> None:
    for way in ACCUMULATIONS.values():
        accumulated(way, (70, 0, 1, 130, 64), 64, 272)
        accumulated(way, (70, 0, 1, 130, 64), 128, 24)
        accumulated(way, (65, 3), 40, 24)  # tiles that reach behind the outputs, where the next group begins
        accumulated(way, (70, 0, 65), 128, 24, factor=0.3)
        accumulated(way, (65,), 40, 24, factor=0.3)
        accumulated(way, (70, 0, 65), 128, 272, replaces=True)
        accumulated(way, (0, 65, 0), 40, 24, factor=0.3, replaces=True)
        accumulated(way, (0, 0), 40, 24, replaces=True)


def accumulated(
    way: Accumulation | None,
    sizes: tuple[int, ...],
    out_width: int,
    in_width: int,
    behind: int = 0,
    factor: float = 1.0,
    replaces: bool = False,
) -> Tensor:
    """Compares a weight gradient with float64, row by row: a wrong tile is not hidden among right ones. The product,
    times `factor`, is added to a total of ones, or replaces one of NaN. The rows behind the groups' rows are NaN and
    infinite. Without a way the kernel with specialised warps computes. Returns the total."""
    dtype = torch.float16 if ON_CPU else torch.bfloat16
    groups, rows = RowGroups(torch.tensor(sizes, device=DEVICE)), sum(sizes)
    dy, x = values(rows + behind, out_width, dtype=dtype), values(rows + behind, in_width, dtype=dtype, seed=1)
    dy[rows:], x[rows:] = float("nan"), float("inf")
    total = torch.full((len(sizes), out_width, in_width), float("nan") if replaces else 1.0, device=DEVICE)
    accumulate_grouped_product_triton(total, dy, x, groups, factor, replaces, way)
    for found, left, right in zip(total, dy[:rows].split(sizes), x[:rows].split(sizes), strict=True):
        exact = (0.0 if replaces else 1.0) + factor * left.double().t() @ right.double()
        errors, sizes_of_rows = (found - exact).norm(dim=1), exact.norm(dim=1)
        assert bool((errors <= 1e-5 * sizes_of_rows).all()), (way, sizes, float(errors.max()))
    return total


def linears() -> None:
    """Checks outputs and both gradients; on a GPU torch's grouped product computes them."""
    half = torch.float16 if ON_CPU else torch.bfloat16
    for dtype, sizes in ((half, [70, 0, 1, 130]), (half, [0, 0, 0, 0]), (torch.float32, [2, 0, 3, 1])):
        results = []
        for function in (grouped_linear, grouped_linear_cuda):
            groups = RowGroups(torch.tensor(sizes, device=DEVICE))
            x = values(sum(sizes), 32, dtype=dtype).requires_grad_()
            weight = nn.Parameter(values(4, 24, 32, dtype=dtype, seed=1))
            output = function(x, weight, groups)
            output.backward(values(*output.shape, dtype=dtype, seed=2))
            results.append((output.detach(), x.grad, weight.grad))
        for expected, ours in zip(*results, strict=True):
            if sum(sizes):
                agree(ours, expected, 4.0, ("grouped linear", dtype, sizes))
            else:
                assert ours.shape == expected.shape and not ours.any() and not expected.any()


def biases() -> None:
    groups = RowGroups(torch.tensor([70, 0, 1, 130], device=DEVICE))
    dy = values(201, 24, dtype=torch.float16)
    results = []
    for function in (grouped_bias, grouped_bias_cuda):
        bias = nn.Parameter(values(4, 24, dtype=torch.float16, seed=1))
        output = function(bias, groups, 201)
        output.backward(dy)
        results.append((output.detach(), bias.grad))
    for expected, ours in zip(*results, strict=True):
        agree(ours, expected, 1.0, "biases")


if __name__ == "__main__":
    places()
    moves()
    activations()
    nan_inputs()
    products()
    linears()
    biases()
    print("agree")
