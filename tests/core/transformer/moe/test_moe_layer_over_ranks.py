"""A layer of experts whose tokens, experts and channels are shared over ranks, against one rank, in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.boxes import error, part_of
from support.pool import Pool
from torch import Tensor, nn

from megatron.core.backends import backend_of_layer, choose_backend
from megatron.core.communication.traffic import recorded
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.parameters import info_of, initialize_parameters, name_parameters
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import DISPATCHERS, MoELayer, MoESubmodules
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.transformer_config import TransformerConfig

TOLERANCE, HIDDEN, LENGTH, ROWS = 1e-11, 8, 6, 2
SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
SHARED = {"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True}
EP2, EP4 = {"ep": 2, "world": 2}, {"ep": 4, "world": 4}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep2, biases": (EP2, {}),
    "ep2, gated, shared": (EP2, {**SWIGLU, **SHARED, "moe_shared_expert_overlap": True}),
    "ep4, one expert a rank": (EP4, {**SWIGLU, "num_moe_experts": 4}),
    "ep4, experts without tokens": (EP4, {"num_moe_experts": 64}),
    "ep4, tokens dropped": (EP4, {"moe_expert_capacity_factor": 0.5}),
    "ep2 tp2": ({"tp": 2, "ep": 2, "world": 2}, {**SWIGLU, **SHARED}),
    "etp2 tp2": ({"tp": 2, "etp": 2, "world": 2}, {}),
    "etp2 of dp2": ({"etp": 2, "world": 2}, {"moe_expert_capacity_factor": 0.7}),
    "ep2 etp2, biases": ({"tp": 2, "ep": 2, "etp": 2, "world": 4}, {**SHARED, "moe_shared_expert_overlap": True}),
    "ep2 edp2, latent": ({"tp": 2, "ep": 2, "world": 4}, {**SWIGLU, "moe_latent_size": 4}),
    "ep2 etp2, one choice, weights on inputs": (
        {"ep": 2, "etp": 2, "world": 4},
        {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
    ),
}


DISPATCHERS_OF_TOKENS = ("allgather", "alltoall", "flex")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def build(settings: dict[str, Any], groups: ProcessGroupCollection | None, grouped: bool, tp: int = 1) -> nn.Module:
    config = TransformerConfig(
        **{"num_layers": 1, "num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 12} | settings,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=4,
        moe_aux_loss_coeff=0.1,
        fp64=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        init_method_std=0.5,
    )
    model = nn.Module()
    parts = MoESubmodules(experts=GroupedMLP if grouped else SequentialMLP)
    model.mlp = MoELayer(config, parts, layer_number=1, pg_collection=groups)
    name_parameters(model)
    initialize_parameters(model, 3)
    for parameter in model.parameters():  # biases too
        with torch.no_grad():
            parameter += 0.1 * torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape).sin()
    return model


def micro_batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs and what the outputs count by, [t, h]."""
    generator = torch.Generator().manual_seed(number)
    shape = (2, LENGTH * ROWS, HIDDEN)
    inputs, weights = torch.randn(shape, dtype=torch.float64, generator=generator)
    return inputs, weights


def run(model: nn.Module, inputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and gradient of the inputs; parameters' gradients add up."""
    inputs = inputs.clone().requires_grad_()
    output, bias = model.mlp(inputs, LayerInputs(Tokens(LENGTH, ROWS)))
    assert bias is None
    (output * weights).sum().backward()
    return output.detach(), inputs.grad


def on_a_rank(layout: dict[str, int], settings: dict[str, Any], grouped: bool, expected: dict) -> dict[str, float]:
    sizes = {"tp": 1, "ep": 1, "etp": 1} | layout
    grid = RankGrid(sizes["world"], tensor=sizes["tp"], expert=sizes["ep"], expert_tensor=sizes["etp"])
    groups = ProcessGroupCollection.from_grid(grid, dist.get_rank())
    model = build(settings, groups, grouped, sizes["tp"])
    load(model, expected["values"])
    sample, tensor = groups.rank("dp"), groups.rank("tp")
    inputs, weights = (whole.chunk(sizes["tp"])[tensor] for whole in micro_batch(sample))
    output, inputs_gradient = run(model, inputs, weights)
    errors = {
        "output": error(output, expected["outputs"][sample].chunk(sizes["tp"])[tensor]),
        "inputs' gradient": error(inputs_gradient, expected["inputs_gradients"][sample].chunk(sizes["tp"])[tensor]),
    }
    for path, parameter in model.named_parameters():
        info = info_of(parameter)
        gradient = parameter.grad.clone()
        for group in {"tp": "tp", "etp": "expt_tp"}.items():
            if group[0] in info.partial_gradient_axes:
                dist.all_reduce(gradient, group=getattr(groups, group[1]))
        dist.all_reduce(gradient, group=groups.expt_dp if info.grid == "expert" else groups.dp)
        canonical = expected["gradients"][info.name]  # an expert without tokens has zeros
        difference = gradient.view(info.box.shape) - part_of(canonical, parameter)
        errors[path] = float(difference.abs().max() / canonical.abs().max())
    return errors


@torch.no_grad()
def load(model: nn.Module, values: dict[str, Tensor]) -> None:
    for parameter in model.parameters():
        parameter.copy_(part_of(values[info_of(parameter).name], parameter).reshape(parameter.shape))


def whole(tensors: list[tuple[nn.Parameter, Tensor]]) -> dict[str, Tensor]:
    """Canonical tensors, put together where a rank has them in parts."""
    found: dict[str, Tensor] = {}
    for parameter, tensor in tensors:
        info = info_of(parameter)
        found.setdefault(info.name, torch.zeros(info.global_shape, dtype=tensor.dtype))
        part_of(found[info.name], parameter).copy_(tensor.detach().view(info.box.shape))
    return found


def prepared(settings: dict[str, Any], samples: int, grouped: bool = False) -> dict[str, Any]:
    """What one rank computes, micro-batch by micro-batch."""
    model = build(settings, None, grouped)
    results = [run(model, *micro_batch(sample)) for sample in range(samples)]
    return {
        "values": whole([(p, p) for p in model.parameters()]),
        "gradients": whole([(p, p.grad) for p in model.parameters()]),
        "outputs": [output for output, _ in results],
        "inputs_gradients": [gradient for _, gradient in results],
    }


@pytest.mark.parametrize(
    ("case", "dispatcher"),
    [
        # Each case with one of the dispatchers, in turn; the others are slow.
        pytest.param(case, dispatcher, marks=[pytest.mark.slow] * ((number + place) % 3 != 1))
        for number, case in enumerate(CASES)
        for place, dispatcher in enumerate(DISPATCHERS_OF_TOKENS)
    ],
)
def test_equals_one_rank(case: str, dispatcher: str, pool: Pool) -> None:
    assert_equals_one_rank(*CASES[case], {"moe_token_dispatcher_type": dispatcher}, pool)


@pytest.mark.fast("ep2, gated, shared", "ep4, tokens dropped")
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("ep2, ", "ep4, "))])
def test_equals_one_rank_if_own_tokens_are_not_sent(case: str, pool: Pool) -> None:
    dispatcher = {"moe_token_dispatcher_type": "flex", "moe_local_token_overlap": True}
    assert_equals_one_rank(*CASES[case], dispatcher, pool)


def assert_equals_one_rank(
    layout: dict[str, int], settings: dict[str, Any], dispatcher: dict[str, Any], pool: Pool
) -> None:
    samples = layout["world"] // layout.get("tp", 1)
    expected = prepared(settings, samples)
    assert all(gradient.any() for name, gradient in expected["gradients"].items())
    settings = {**settings, **dispatcher}
    for grouped in (False, True):
        for rank, errors in enumerate(pool.run(on_a_rank, layout["world"], layout, settings, grouped, expected)):
            wrong = {name: value for name, value in errors.items() if not value < TOLERANCE}
            assert len(errors) >= 5 and not wrong, (grouped, rank, wrong)


def sources(dispatcher: str, precision: dict[str, Any], etp: int) -> tuple[list[int], list[list[int]] | None]:
    """Returns the rows of each expert of this rank, and how many of them each source sent, if the experts are told."""
    groups = ProcessGroupCollection.from_grid(RankGrid(4, expert=4 // etp, expert_tensor=etp), dist.get_rank())
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=8, moe_token_dispatcher_type=dispatcher,
        moe_router_topk=2, bf16=True, expert_model_parallel_size=4 // etp, **precision,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(dist.get_rank())
    experts = torch.rand(24, 8, generator=generator).topk(2).indices
    backend = backend_of_layer(choose_backend(config), config, 1, groups)
    exchange = DISPATCHERS[dispatcher](config, groups, backend).plan(Routing(experts, torch.ones(24, 2)))
    exchange.start_dispatch(torch.zeros(24, 16, dtype=torch.bfloat16))
    rows = exchange.finish_dispatch().groups
    return list(rows.host_sizes), None if rows.by_source is None else rows.by_source.tolist()


@pytest.mark.parametrize("etp", [1, 2])
def test_experts_in_fp8_know_which_ranks_their_rows_are_from(etp: int, pool: Pool) -> None:
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    expected = pool.run(sources, 4, "alltoall", fp8, etp)
    assert any(sizes != [12] * len(sizes) for sizes, _ in expected)
    assert pool.run(sources, 4, "allgather", fp8, etp) == expected
    # Others do not need it, and it takes time.
    assert [told for _, told in pool.run(sources, 4, "allgather", {}, etp)] == [None] * 4


def drawn(layout: dict[str, int], grouped: bool, values: dict[str, Tensor]) -> bool:
    grid = RankGrid(4, tensor=1, expert=layout["ep"], expert_tensor=layout["etp"])
    model = build({}, ProcessGroupCollection.from_grid(grid, dist.get_rank()), grouped)
    initialize_parameters(model, 3)
    return all(
        torch.equal(part_of(values[info_of(p).name], p).reshape(p.shape), p.detach()) for p in model.parameters()
    )


def test_initial_values_do_not_know_how_experts_are_shared(pool: Pool) -> None:
    model = build({}, None, grouped=True)
    initialize_parameters(model, 3)
    values = whole([(p, p) for p in model.parameters()])
    for layout in ({"ep": 4, "etp": 1}, {"ep": 2, "etp": 2}):
        for grouped in (False, True):
            assert all(pool.run(drawn, 4, layout, grouped, values))


def sent(dispatcher: str) -> dict[str, float]:
    groups = ProcessGroupCollection.from_grid(RankGrid(4, expert=4), dist.get_rank())
    model = build({"moe_token_dispatcher_type": dispatcher}, groups, grouped=True)
    with recorded() as traffic:
        run(model, *micro_batch(groups.rank("dp")))
    totals: dict[str, float] = {}
    for entry in traffic:
        totals[entry.operation] = totals.get(entry.operation, 0) + 1
    return totals


def test_what_is_sent(pool: Pool) -> None:
    """All-to-all: rows and weights go, rows come back, and their gradients the other way; one gather tells sizes."""
    assert pool.run(sent, 4, "alltoall") == [{"all_gather": 1, "all_to_all": 6}] * 4
    # Flex: numbers of experts go beside them.
    assert pool.run(sent, 4, "flex") == [{"all_gather": 1, "all_to_all": 7}] * 4
    # All-gather: rows, weights and numbers of experts come, sums go; backward gathers once and sums twice.
    assert pool.run(sent, 4, "allgather") == [{"all_gather": 4, "reduce_scatter": 3}] * 4


def rows_sent(dispatcher: str) -> tuple[float, int, int]:
    """Rows of the first exchange; copies for experts, and pairs of a token and a rank that holds any of its experts."""
    groups = ProcessGroupCollection.from_grid(RankGrid(4, expert=4), dist.get_rank())
    settings = {"moe_token_dispatcher_type": dispatcher, "moe_router_topk": 4, "moe_expert_capacity_factor": 0.8}
    model = build(settings, groups, grouped=True)
    inputs, weights = micro_batch(groups.rank("dp"))
    with recorded() as traffic:
        run(model, inputs, weights)
    routing = model.mlp.router.route(inputs, LayerInputs(Tokens(LENGTH, ROWS)))
    assert routing.kept is not None
    pairs = {(int(t), int(routing.experts[t, j]) // 2) for t, j in routing.kept.nonzero()}
    first = next(entry for entry in traffic if entry.operation == "all_to_all" and entry.dtype is torch.float64)
    return first.nbytes / (8 * HIDDEN), int(routing.kept.sum()), len(pairs)


def test_flex_sends_a_token_once_to_a_rank(pool: Pool) -> None:
    for dispatcher, which in (("alltoall", 1), ("flex", 2)):
        for counts in pool.run(rows_sent, 4, dispatcher):
            assert counts[2] < counts[1] and counts[0] == counts[which], (dispatcher, counts)
