"""What strategies cost: bytes that a rank keeps, whole buffers alive at a time, bytes and types on the wire."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.pool import Pool
from support.sharding import STRATEGIES, groups_of, wrap
from support.small_models import Layer
from torch import Tensor, nn

from megatron.core.communication.traffic import Traffic, recorded
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.initializers import Normal
from megatron.core.ops.embedding import embedding
from megatron.core.ops.linear import linear
from megatron.core.parameters import declare, initialize_parameters, name_parameters

LAYERS, WIDTH, ROWS = 5, 16, 24
Held = dict[str, int]


class Table(nn.Module):
    backward_reads_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, WIDTH))
        declare(self.weight, Normal(0.5), embedding_or_output=True)

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class Head(nn.Module):
    """Reads the table's weight, which is not below it."""

    borrowed_parameters: tuple[nn.Parameter, ...] = ()

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight)


class Stack(nn.Module):
    """Ids -> logits, of modules that are called."""

    def __init__(self, dtype: torch.dtype = torch.float32, borrows: bool = True) -> None:
        super().__init__()
        self.config = None
        self.embedding = Table().to(dtype)
        self.layers = nn.ModuleList(Layer(WIDTH).to(dtype) for _ in range(LAYERS))
        self.head = Head()
        if borrows:
            self.head.borrowed_parameters = (self.embedding.weight,)
        self.seen: list[Held] = []
        name_parameters(self)
        initialize_parameters(self, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x, weight=self.embedding.weight).float().square().mean()


def nbytes(tensors: "Iterator[Tensor]") -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def held(ddp: DistributedDataParallel, states: Any = ()) -> Held:
    """Bytes by what they are."""
    units = ddp.units
    return {
        "weights": nbytes(t for u in units for t in (u.param_buffer, u.weight_shard)),
        "gradients": nbytes(t for u in units for t in (u.grad_buffer, u.gradient_shard)),
        "state": nbytes(
            t
            for s in states
            for held in (*s.moments.values(), *([s.weights] if s.unit.plan.needs_main_weights else []))
            for t in held.movable
        ),
        "whole weights": sum(u.has_whole_weights for u in units),
        "whole gradients": sum(u.grad_buffer.untyped_storage().nbytes() > 0 for u in units),
    }


def costs(name: str, dtype: torch.dtype) -> tuple[Held, list[Held], list[Traffic], list[int]]:
    """What a rank holds between steps, what it holds at each contribution to a gradient of two steps, and what it sends
    in the second, each step being of two micro-batches."""
    groups = groups_of(4)
    model = Stack(dtype)
    ddp, optimizer = wrap(model, groups, **STRATEGIES[name])  # type: ignore[arg-type]
    alive: list[Held] = []
    for parameter in model.parameters():
        main_grad: Any = parameter.main_grad_accumulator
        main_grad.before_write = _then(main_grad.before_write, lambda: alive.append(held(ddp)))
        main_grad.on_accumulated = _then(main_grad.on_accumulated, lambda: alive.append(held(ddp)))
    for module in model.modules():  # at the turn from one module's backward to the next one's
        module.register_forward_hook(_watch_gradient(lambda: alive.append(held(ddp))))
    with recorded() as traffic:
        for step in range(2):
            if step == 1:
                traffic.clear()
            ddp.zero_grad_buffer()
            for number in range(2):
                ids = torch.arange(8).view(2, 4) + groups.rank("dp") + 3 * number + step
                loss = ddp(ids)
                if number == 0:
                    with ddp.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            finalize_model_grads([ddp])
            optimizer.step_on_device()
    traffic[:] = [entry for entry in traffic if entry.nbytes > 8]  # without what sums the norm up
    between = held(ddp, optimizer.states)
    groups.close()
    return between, alive, list(traffic), [unit.plan.numel for unit in ddp.units]


def _then(first: Any, second: Any) -> Any:
    def both(*arguments: Any) -> None:
        first(*arguments)
        second()

    return both


def _watch_gradient(look: Any) -> Any:
    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: look())

    return watch


@pytest.mark.fast(
    "no_shard-dtype1",
    "optim-dtype1",
    "optim_grads-dtype1",
    "optim_grads_params-dtype0",
    "optim, plain-dtype0",
    "optim_grads, plain-dtype0",
    "optim_grads_params, plain-dtype1",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_that_a_rank_keeps_and_sends(pool: Pool, name: str, dtype: torch.dtype) -> None:
    wide, kind = dtype.itemsize, name.partition(",")[0]
    for between, alive, traffic, sizes in pool.run(costs, 4, name, dtype):
        numel, masters = sum(sizes), int(dtype is torch.bfloat16)
        state = numel * 4 * (2 + masters)
        whole_weights, whole_gradients, sharded_state = numel * wide, numel * 4, state // 4
        expected = {
            "no_shard": (whole_weights, whole_gradients, state),
            "optim": (whole_weights, whole_gradients, sharded_state),
            "optim_grads": (whole_weights, whole_gradients // 4, sharded_state),
            "optim_grads_params": (whole_weights // 4, whole_gradients // 4, sharded_state),
        }
        assert (between["weights"], between["gradients"], between["state"]) == expected[kind]
        if kind.startswith("optim_grads"):
            # The unit that backward is at, and with overlap the one whose reduction is under way; the table, which the
            # head feeds first, is there throughout. So from the first backward on.
            assert max(moment["whole gradients"] for moment in alive) == (2 if "plain" in name else 3)
        if kind == "optim_grads_params":
            # The unit that backward is at, and with overlap the one ahead.
            assert max(moment["whole weights"] for moment in alive) == (1 if "plain" in name else 2)
        by_operation = {
            operation: (
                sum(t.nbytes for t in traffic if t.operation == operation),
                {t.dtype for t in traffic if t.operation == operation},
            )
            for operation in {t.operation for t in traffic}
        }
        wires = {
            "no_shard": {"all_reduce": (numel * 4, {torch.float32})},
            "optim": {"reduce_scatter": (numel * 4, {torch.float32})},
            "optim_grads": {"reduce_scatter": (2 * numel * 4, {torch.float32})},
            # The table is gathered by forward once at each end, the head's for backward stays from forward.
            "optim_grads_params": {
                "reduce_scatter": (2 * numel * 4, {torch.float32}),
                "all_gather": (2 * (2 * numel) * wide, {dtype}),
            },
        }[kind]
        if kind in ("optim", "optim_grads"):
            wires["all_gather"] = (numel * wide, {dtype})
        assert by_operation == wires


def narrow_wire(settings: dict[str, Any]) -> tuple[list[Traffic], int, list[float]]:
    """Gradients of 256 on the first rank and 1 on the others: their sum, 259, is no bfloat16, and 257 is none."""
    groups = groups_of(4)
    ddp, _ = wrap(Stack(torch.bfloat16), groups, grad_reduce_in_fp32=False, **settings)  # type: ignore[arg-type]
    ddp.zero_grad_buffer()
    for parameter in ddp.module.parameters():
        value = 4.0 * (256.0 if groups.rank("dp") == 0 else 1.0)  # the mean is taken of four
        parameter.main_grad_accumulator.add(torch.full(parameter.shape, value))  # type: ignore[attr-defined]
    with recorded() as traffic:
        ddp.finish_grad_sync()
    found = {value for chunk in ddp.gradient_chunks() for value in chunk.tensor.tolist()}
    groups.close()
    return traffic, sum(unit.plan.numel for unit in ddp.units), sorted(found)


@pytest.mark.parametrize("name", ["optim", "optim_grads", "optim_grads_params"])
def test_a_narrow_wire_and_sums_in_float32(pool: Pool, name: str) -> None:
    for precise in (False, True):
        settings = STRATEGIES[name] | {"reduce_scatter_with_fp32_accumulation": precise}
        answers = pool.run(narrow_wire, 4, settings)
        for traffic, numel, values in answers:
            assert {t.operation for t in traffic} == {"all_to_all" if precise else "reduce_scatter"}
            assert {t.dtype for t in traffic} == {torch.bfloat16}
            assert sum(t.nbytes for t in traffic) == 2 * numel
            if precise:
                assert values in ([259.0], [])
        if not precise:
            assert all(value != 259.0 for _, _, values in answers for value in values)


def read_outside(borrows: bool) -> str:
    groups = groups_of(2)
    model = Stack(borrows=borrows)
    ddp, _ = wrap(model, groups, **STRATEGIES["optim_grads_params"])  # type: ignore[arg-type]
    weight = model.embedding.weight
    assert tuple(weight.shape) == (ROWS, WIDTH) and weight.numel() == ROWS * WIDTH
    messages = []
    for read in (lambda: weight + 1, lambda: weight.detach(), lambda: weight[0], lambda: torch.mm(weight, weight.t())):
        with pytest.raises(RuntimeError) as caught:
            read()
        messages.append(str(caught.value))
    assert all("embedding.weight is read (" in text and "borrowed_parameters" in text for text in messages)
    with ddp.whole_weights():
        assert torch.isfinite(weight).all() and weight.abs().sum() > 0
    if not borrows:
        with pytest.raises(RuntimeError, match=r"embedding\.weight is read"):
            ddp(torch.zeros(1, 4, dtype=torch.int64))
    groups.close()
    return messages[0]


@pytest.mark.parametrize("borrows", [True, False])
def test_reading_a_weight_that_is_not_gathered_is_an_error_that_names_it(pool: Pool, borrows: bool) -> None:
    assert len(set(pool.run(read_outside, 2, borrows))) == 1


def after_an_update(name: str) -> tuple[bool, float]:
    """A forward without a backward leaves its last weights behind; then an update: does the next forward see it?"""
    groups = groups_of(2)
    model = Stack()
    ddp, optimizer = wrap(model, groups, **STRATEGIES[name])  # type: ignore[arg-type]
    ids = torch.arange(4)[None]
    before = float(ddp(ids).detach())
    for chunk in ddp.gradient_chunks():
        chunk.tensor.fill_(1.0)
    optimizer.step_on_device()
    with ddp.whole_weights():
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    after = float(ddp(ids).detach())
    plain = Stack()
    plain.load_state_dict(weights, strict=False)
    groups.close()
    return before != after, after - float(plain(ids).detach())


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_weights_outlive_an_update(pool: Pool, name: str) -> None:
    assert pool.run(after_an_update, 2, name) == [(True, 0.0)] * 2


def late_reductions(name: str) -> list[int]:
    """TwoLevelReduction begun after each phase of two micro-batches whose products are put off."""
    groups = groups_of(2)
    ddp, _ = wrap(Stack(), groups, **STRATEGIES[name])  # type: ignore[arg-type]
    seen = []
    with recorded() as traffic:
        for number in (0, 1):
            loss = ddp(torch.arange(4)[None] + number)
            with ddp.defer_weight_gradients(number):
                loss.backward()
            seen.append(sum(entry.operation == "reduce_scatter" for entry in traffic))
        for number in (0, 1):
            ddp.compute_weight_gradients(number)
            seen.append(sum(entry.operation == "reduce_scatter" for entry in traffic))
        ddp.finish_grad_sync()
    seen.append(sum(entry.operation == "reduce_scatter" for entry in traffic))
    groups.close()
    return seen


@pytest.mark.parametrize("name", ["optim_grads", "optim_grads_params"])
def test_late_products_are_reduced_micro_batch_by_micro_batch(pool: Pool, name: str) -> None:
    units = LAYERS + 1
    assert pool.run(late_reductions, 2, name) == [[0, 0, units, 2 * units, 2 * units]] * 2
