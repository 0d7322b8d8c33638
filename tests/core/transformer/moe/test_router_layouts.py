"""Routers whose micro-batch is shared by tensor and context parallel ranks, against one process, in float64.

Each rank routes its own tokens. Routings are equal token by token; the gradient of the weight, summed over the ranks
that share a micro-batch, is that of one process; what is reported is too. tests/parity has rows without padding.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool
from support.tiny_models import tiny_config
from torch import Tensor

from megatron.core.communication.collectives import all_reduce
from megatron.core.context_parallel import sequence_part
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.tokens import RngPosition, Tokens, row_index
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.layer_metrics import take_layer_metrics
from megatron.core.transformer.moe.router import TopKRouter

S, B, H, EXPERTS, SAMPLES = 8, 2, 12, 4, 4

PADDED: dict[str, Any] = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.5],
    "moe_z_loss_coeff": 0.2,
    "moe_expert_capacity_factor": 0.75,
    "calculate_per_token_loss": True,
}
LAYOUTS = {"TP2": (2, 1, 1), "CP2": (1, 2, 1), "TP2 x CP2": (2, 2, 1), "DP2": (1, 1, 2), "TP2 x DP2": (2, 1, 2)}


def data() -> Tensor:
    """Hidden states of all samples, [samples, s, h]; some tokens are equal, as embeddings of one word are."""
    generator = torch.Generator().manual_seed(3)
    vocabulary = torch.randn(11, H, generator=generator, dtype=torch.float64)
    return vocabulary[torch.randint(11, (SAMPLES, S), generator=generator)]


def micro_batch(first: int) -> tuple[Tensor, Tokens]:
    """[t, h] of two samples."""
    samples = data()[first : first + B]
    return samples.transpose(0, 1).reshape(S * B, H), Tokens(S, B, random=RngPosition(7, 3, first))


def routed(layout: tuple[int, int, int]) -> dict[str, Any]:
    """What this rank's router makes of its part of a global batch of two micro-batches, gradients finalised. The rows
    end in padding."""
    tensor, context, data_parallel = layout
    ranks = tensor * context * data_parallel
    rank = dist.get_rank() if ranks > 1 else 0
    groups = ProcessGroupCollection.from_grid(RankGrid(ranks, tensor=tensor, context=context), rank)
    sizes = {"tensor_model_parallel_size": tensor, "context_parallel_size": context, "sequence_parallel": tensor > 1}
    config = tiny_config(hidden_size=H, num_moe_experts=EXPERTS, add_bias_linear=False, **sizes, **PADDED)
    router = TopKRouter(config, groups, layer_number=1)
    router.weight.data = torch.randn(EXPERTS, H, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = []
    for number in range(2):
        if number % data_parallel != groups.rank("dp"):
            continue
        hidden, tokens = micro_batch(number * B)
        index = torch.arange(len(hidden)).view(tokens.seq_length, tokens.batch_size)
        part = sequence_part(groups)
        if part is not None:
            tokens = Tokens(
                tokens.seq_length // context,
                tokens.batch_size,
                part,
                sample_length=tokens.sample_length,
                random=tokens.random,
            )
            index = index[row_index(tokens)]
        own = index.flatten().chunk(tensor)[groups.rank("tp")]
        scale = torch.tensor(1.0)
        lengths = torch.tensor([[S - 3], [S - 1 - number]])
        mask = row_index(tokens).expand(B, -1) >= lengths
        routing = router.route(hidden[own], LayerInputs(tokens, auxiliary_scale=scale, padding_mask=mask))
        factors = (number * 100 + own[:, None] * 7 + routing.experts * 3).double().sin()
        (routing.weights * factors).sum().mul(len(hidden)).backward()
        kept = torch.ones_like(routing.experts) if routing.kept is None else routing.kept
        for token, row in zip(own.tolist(), zip(routing.experts, routing.weights, kept, strict=True), strict=True):
            found.append(((number, token), [tensor.tolist() for tensor in row]))
    gradient = router.weight.grad.clone()
    if tensor > 1:
        all_reduce(gradient, groups.tp)  # as its descriptor says
    assert router.weight.info.partial_gradient_axes == ({"tp"} if tensor > 1 else set())
    if ranks > tensor:
        all_reduce(gradient, groups.dp_cp)
    numbers = {}
    for report in take_layer_metrics([router]):
        both = torch.cat([report.total.reshape(-1), report.count.reshape(1)])
        if ranks > 1:
            all_reduce(both, groups.tp_dp_cp)
        numbers[report.name] = both[:-1].tolist() if report.name == "moe_load" else (both[0] / both[1]).item()
    return {"tokens": found, "gradient": gradient, "reports": numbers}


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    tokens = dict(item for rank in found for item in rank["tokens"])
    assert sum(len(rank["tokens"]) for rank in found) == len(tokens) == 2 * B * S
    for place, (experts, weights, kept) in expected["tokens"]:
        assert tokens[place][0] == experts and tokens[place][2] == kept, place
        assert tokens[place][1] == pytest.approx(weights, rel=1e-12)
    for rank in found:
        torch.testing.assert_close(rank["gradient"], expected["gradient"], rtol=1e-11, atol=1e-13)
        assert rank["reports"].keys() == expected["reports"].keys()
        for name, value in expected["reports"].items():
            assert rank["reports"][name] == pytest.approx(value, rel=1e-11), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_does_not_change_the_routing_of_rows_with_padding(pool: Pool, layout: str) -> None:
    expected = routed((1, 1, 1))
    assert expected["gradient"].abs().max() > 1e-3
    assert any(not all(kept) for _, (_, _, kept) in expected["tokens"])
    sizes = LAYOUTS[layout]
    check(pool.run(routed, sizes[0] * sizes[1] * sizes[2], sizes), expected)


def global_loss(data_parallel: int) -> Tensor:
    """The weight's gradient of one step of one micro-batch on each data parallel rank, averaged over the ranks."""
    fields = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.5}
    groups = ProcessGroupCollection.from_grid(RankGrid(data_parallel), dist.get_rank())
    config = tiny_config(hidden_size=H, num_moe_experts=EXPERTS, add_bias_linear=False, **fields)
    router = TopKRouter(config, groups, layer_number=1)
    router.weight.data = torch.randn(EXPERTS, H, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    hidden, tokens = micro_batch(groups.rank("dp") * B)
    (router.route(hidden, LayerInputs(tokens)).weights.sum() * 0).backward()
    assert router.weight.grad is not None
    return all_reduce(router.weight.grad, groups.dp) / data_parallel


def test_balance_of_the_global_batch_is_that_of_all_ranks_tokens(pool: Pool) -> None:
    """The gradient is that of one rank with one micro-batch of all the tokens."""
    (found, _) = pool.run(global_loss, 2, 2)
    weight = torch.randn(EXPERTS, H, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()
    scores = torch.softmax(data().view(-1, H) @ weight.t(), -1)
    counts = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0).sum(0)
    (0.5 * EXPERTS / (2 * len(scores) ** 2) * (scores.sum(0) * counts).sum()).backward()
    torch.testing.assert_close(found, weight.grad, rtol=1e-11, atol=1e-14)
