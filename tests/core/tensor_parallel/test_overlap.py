"""Products in pieces over two and three ranks: values, every gradient and what is exchanged, against one process."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from core.tensor_parallel.test_layers_over_ranks import WatchedMainGrad, values
from support.boxes import error, fill, gradient_errors
from support.pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.communication.collectives import PlannedGroup
from megatron.core.communication.traffic import recorded
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.ops.linear import SequenceShard
from megatron.core.parameters import name_parameters
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.overlap import ProductsInPieces

RANKS = 3
T, B, IN, OUT = 2 * RANKS, 2, 2 * RANKS, 4 * RANKS
TOLERANCE = 1e-13
SWITCHES = list(itertools.product([False, True], repeat=3))
"""--disable-tp-comm-overlap-ag, --disable-tp-comm-overlap-rs, --tp-comm-overlap-rs-dgrad."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(RANKS, seconds=60.0) as pool:
        yield pool


def config(**settings: Any) -> ModelParallelConfig:
    sizes = {"tensor_model_parallel_size": RANKS, "sequence_parallel": True, "fp64": True}
    return ModelParallelConfig(**{**sizes, "tp_comm_overlap": True, **settings})


def part(whole: Tensor, dim: int) -> Tensor:
    return whole.chunk(RANKS, dim)[dist.get_rank()].clone()


def build(kind: type[nn.Module], group: Any = None, **settings: Any) -> Any:
    more = {"input_is_parallel": True, "skip_bias_add": False} if kind is RowParallelLinear else {}
    layer = kind(
        IN,
        OUT,
        config=config(**settings),
        init_method=nn.init.normal_,
        bias=True,
        tp_group=dist.group.WORLD if group is None else group,
        **more,
    )
    name_parameters(layer)
    return layer


def errors_of(kind: type[nn.Module], settings: dict[str, Any], recomputes: bool = False) -> dict[str, float]:
    """Differences from one process, of a layer that runs forward twice before it runs backward twice."""
    layer = build(kind, **settings)
    weight, bias = values(OUT, IN, seed=3).requires_grad_(), values(OUT, seed=4).requires_grad_()
    fill(layer, {"weight": weight.detach(), "bias": bias.detach()})
    columns = kind is ColumnParallelLinear
    errors, losses = {}, []
    for number in range(2):
        x = values(T, B, IN, seed=10 + number).requires_grad_()
        g = values(T, B, OUT, seed=20 + number)
        y = F.linear(x, weight, bias)
        (y * g).sum().backward()
        own = part(x.detach(), 0 if columns else -1).requires_grad_()
        output = checkpoint(lambda given: layer(given)[0], own, use_reentrant=False) if recomputes else layer(own)[0]
        errors[f"y {number}"] = error(output.detach(), part(y.detach(), -1 if columns else 0))
        losses.append(((output * part(g, -1 if columns else 0)).sum(), own, part(x.grad, 0 if columns else -1)))
    for number, (loss, own, gradient) in enumerate(losses):
        loss.backward()
        errors[f"x {number}"] = error(own.grad, gradient)
    return errors | gradient_errors(layer, {"weight": weight.grad, "bias": bias.grad}, dist.group.WORLD)


def all_switches(kind: type[nn.Module]) -> dict[Any, dict[str, float]]:
    names = ("tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad")
    cases = [dict(zip(names, switches, strict=True)) for switches in SWITCHES]
    found = {tuple(case.values()): errors_of(kind, case) for case in cases}
    return found | {"recomputed": errors_of(kind, cases[-1], recomputes=True)}


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_values_and_gradients_with_every_switch(kind: type[nn.Module], pool: Pool) -> None:
    for rank, found in enumerate(pool.run(all_switches, RANKS, kind)):
        assert len(found) == len(SWITCHES) + 1
        for case, errors in found.items():
            assert errors and not {k: v for k, v in errors.items() if not v < TOLERANCE}, (rank, case, errors)


# ---------------------------------------------------------------------------------------------------------------------
# What is exchanged, and when


def operations(log: list[Any]) -> list[str]:
    return [entry.operation for entry in log]


def messages(kind: type[nn.Module], defers: bool) -> dict[str, Any]:
    layer = build(kind)
    columns = kind is ColumnParallelLinear
    x = part(values(T, B, IN), 0 if columns else -1).requires_grad_()
    with recorded() as forward:
        output, _ = layer(x)
    with recorded() as backward:
        main_grad = layer.weight.main_grad_accumulator = WatchedMainGrad(defers, backward)
        output.sum().backward()
    assert main_grad.product is not None
    rows, inputs = main_grad.product
    return {
        "forward": operations(forward),
        "backward": operations(backward),
        "before the weight gradient": main_grad.sent_before.count("send"),
        "shard": isinstance(inputs, SequenceShard),
        "rows": len(rows),
    }


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_messages_are_sent_before_the_weight_gradient(kind: type[nn.Module], defers: bool, pool: Pool) -> None:
    others = RANKS - 1
    for seen in pool.run(messages, RANKS, kind, defers):
        assert set(seen["forward"]) | set(seen["backward"]) == {"send", "receive"}
        assert seen["forward"].count("send") == seen["forward"].count("receive") == others
        # A column parallel layer gathers x, unless that is deferred too, and sums dx; a row parallel one gathers dy.
        sent = 2 * others if kind is ColumnParallelLinear and not defers else others
        assert seen["backward"].count("send") == seen["before the weight gradient"] == sent
        assert seen["rows"] == T * B and seen["shard"] == (defers and kind is ColumnParallelLinear)


# ---------------------------------------------------------------------------------------------------------------------
# Which layers cut their products


GROUP = PlannedGroup((0, 1, 2), 0)


def test_layers_without_sequence_parallelism_and_those_of_experts_do_not() -> None:
    for kind in (ColumnParallelLinear, RowParallelLinear):
        assert "ProductsInPieces" in str(vars(build(kind, GROUP)))
        for settings in ({"sequence_parallel": False}, {"tp_comm_overlap": False}):
            assert "ProductsInPieces" not in str(vars(build(kind, GROUP, **settings))), settings
    expert = ColumnParallelLinear(
        IN, OUT, config=config(), init_method=nn.init.normal_, is_expert=True, tp_group=GROUP, bias=False
    )
    assert "ProductsInPieces" not in str(vars(expert))


def test_rows_that_have_no_piece_for_each_rank_are_refused() -> None:
    with pytest.raises(UserError, match="--tp-comm-overlap: 4 rows do not divide into a piece for each of 3 tensor"):
        build(RowParallelLinear, GROUP)(torch.zeros(4, IN // RANKS, dtype=torch.float64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPUs")
def test_a_transport_that_this_machine_lacks_is_refused_when_the_layer_is_built() -> None:
    with pytest.raises(UserError, match="symmetric-memory needs GPUs"):
        build(ColumnParallelLinear, GROUP, tp_comm_overlap_transport="symmetric-memory")


def test_a_layer_keeps_its_switches() -> None:
    pieces = build(RowParallelLinear, GROUP, tp_comm_overlap_rs_dgrad=True, tp_comm_overlap_rs=False).pieces
    assert isinstance(pieces, ProductsInPieces)
    assert (pieces.cuts_gathers, pieces.cuts_sums, pieces.cuts_summed_gradients) == (True, False, True)
