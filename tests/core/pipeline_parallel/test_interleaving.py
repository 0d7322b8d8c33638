"""Turns of two micro-batches: their order, what they carry over, how they fail; and the numbers of whole steps."""

import _thread
import contextvars
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from core.pipeline_parallel.stage_models import LENGTH, StageModel, batch, config
from support.processes import run_on_ranks
from torch import Tensor, nn

from megatron.core.communication.collectives import start_all_to_all_rows
from megatron.core.communication.traffic import recorded
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.micro_batch import CooperativeTurn, MicroBatch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.interleaving import Interleaver, MicroBatchTurn
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.utils.recomputed import Recomputed

Events = list[str]


def story(events: Events, turn: MicroBatchTurn, name: str, hands: int, fails_at: int | None = None) -> None:
    for place in range(hands + 1):
        events.append(f"{name}{place}")
        if place == fails_at:
            raise ValueError(f"{name} fails")
        if place < hands:
            turn.yield_turn()


def pair_of_stories(forward_hands: int, backward_hands: int, **fails: int) -> Events:
    events: Events = []
    turns = MicroBatchTurn(), MicroBatchTurn()
    with Interleaver() as interleaver:
        interleaver.run(
            partial(story, events, turns[0], "f", forward_hands, fails.get("forward")),
            partial(story, events, turns[1], "b", backward_hands, fails.get("backward")),
            *turns,
        )
    return events


@pytest.mark.parametrize(
    ("hands", "order"),
    [
        ((2, 2), "f0 b0 f1 b1 f2 b2"),
        ((0, 3), "f0 b0 b1 b2 b3"),
        ((3, 0), "f0 b0 f1 f2 f3"),
        ((1, 3), "f0 b0 f1 b1 b2 b3"),
        ((3, 1), "f0 b0 f1 b1 f2 f3"),
        ((0, 0), "f0 b0"),
    ],
)
def test_turns(hands: tuple[int, int], order: str) -> None:
    for _ in range(20):  # a race would show now and then
        assert " ".join(pair_of_stories(*hands)) == order


def test_alone_nothing_is_handed_over() -> None:
    turn = MicroBatchTurn()
    turn.yield_turn()
    with Interleaver() as interleaver:
        interleaver.run(turn.yield_turn, lambda: None, turn, MicroBatchTurn())
        turn.yield_turn()  # a pair that is over leaves nothing behind


def test_only_the_backward_runs_in_another_thread_which_goes_away() -> None:
    threads: list[threading.Thread] = []

    def note() -> None:
        threads.append(threading.current_thread())

    with Interleaver() as interleaver:
        for _ in range(2):
            interleaver.run(note, note, MicroBatchTurn(), MicroBatchTurn())
    assert threads[0] is threads[2] is threading.current_thread()
    assert threads[1] is threads[3] is not threads[0] and not threads[1].is_alive()


@pytest.mark.parametrize(
    ("who", "at", "order"),
    [
        ("forward", 1, "f0 b0 f1"),  # the other stops where it waits
        ("backward", 1, "f0 b0 f1 b1"),
        ("forward", 0, "f0 b0"),  # before the other's first turn, which ends at its next
        ("backward", 3, "f0 b0 f1 b1 f2 b2 f3 b3"),
    ],
)
def test_an_error_ends_both_and_is_shown_as_it_was(who: str, at: int, order: str) -> None:
    threads = threading.active_count()
    events: Events = []
    turns = MicroBatchTurn(), MicroBatchTurn()
    stories = {
        name: partial(story, events, turn, name[0], 3, at if name == who else None)
        for name, turn in zip(("forward", "backward"), turns, strict=True)
    }
    with Interleaver() as interleaver:
        with pytest.raises(ValueError, match=f"{who[0]} fails") as error:
            interleaver.run(*stories.values(), *turns)
        shown = "".join(traceback.format_exception(error.value))
        assert "in story" in shown and "_PartnerFailed" not in shown
        assert " ".join(events) == order
        events.clear()
        interleaver.run(  # and the next pair is not concerned
            partial(story, events, turns[0], "f", 1), partial(story, events, turns[1], "b", 1), *turns
        )
        assert " ".join(events) == "f0 b0 f1 b1"
    assert threading.active_count() == threads


def test_an_interrupt_waits_for_the_others_turn_to_end() -> None:
    """Ctrl-C comes while the backward computes: nothing is left running behind."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it without
    turns = MicroBatchTurn(), MicroBatchTurn()
    state: list[str] = []

    def backward() -> None:
        _thread.interrupt_main()
        time.sleep(0.2)
        state.append("turn ended")
        turns[1].yield_turn()
        state.append("went on")

    try:
        with Interleaver() as interleaver, pytest.raises(KeyboardInterrupt):
            interleaver.run(turns[0].yield_turn, backward, *turns)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert state == ["turn ended"]


@pytest.mark.parametrize("hands", [0, 1], ids=["forward is through", "forward waits"])
def test_a_second_interrupt_waits_for_nothing(hands: int) -> None:
    """Ctrl-C comes twice, and then no more, in a turn of the backward that is longer than anybody would wait: the pair
    is over at once, and its thread at the end of that turn."""
    turns = MicroBatchTurn(), MicroBatchTurn()
    goes_on, ended, interrupted, state = threading.Event(), threading.Event(), threading.Event(), list[str]()

    def interrupt() -> None:
        interrupted.clear()
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        interrupted.wait(240.0)  # two that come before the first is handled would count as one

    def handle(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGINT, handle)

    def backward() -> None:
        try:
            interrupt()
            interrupt()
            goes_on.wait(480.0)
            turns[1].yield_turn()
            state.append("went on")
        finally:
            ended.set()

    watchdog = threading.Timer(240.0, lambda: (state.append("stuck"), interrupt()))
    watchdog.start()
    threads = threading.active_count()
    try:
        with Interleaver() as interleaver:
            with pytest.raises(KeyboardInterrupt):
                interleaver.run(partial(story, [], turns[0], "f", hands), backward, *turns)
            assert not ended.is_set()
            events: Events = []
            others = MicroBatchTurn(), MicroBatchTurn()
            interleaver.run(  # the next pair is not concerned
                partial(story, events, others[0], "f", 1), partial(story, events, others[1], "b", 1), *others
            )
            assert events == ["f0", "b0", "f1", "b1"] and not ended.is_set()
        goes_on.set()
        assert ended.wait(240.0)
        until = time.monotonic() + 240.0
        while threading.active_count() > threads and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() == threads and not state
    except KeyboardInterrupt:  # the watchdog's
        pytest.fail("the pair waits for its backward's turn, or for one of its own")
    finally:
        watchdog.cancel()
        signal.signal(signal.SIGINT, handler)


VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


def draws_of_a_pair(pairs: bool) -> list[list[float]]:
    """What layers draw from torch's generator in a forward, and in a backward that computes its own layer again."""
    seen: list[list[float]] = []
    turns = MicroBatchTurn(), MicroBatchTurn()

    def layer(number: int) -> Recomputed:
        def drawing(x: Tensor) -> Tensor:
            drawn = torch.rand(2)
            turns[number].yield_turn()
            drawn = torch.cat([drawn, torch.rand(2)])
            turns[number].yield_turn()
            seen.append([number, *drawn.tolist(), *torch.rand(1).tolist()])
            return (x * drawn.sum()).sin()

        return Recomputed(drawing)

    torch.manual_seed(3)
    x = torch.ones(2, requires_grad=True)
    kept = layer(1)(x).sum()
    with Interleaver() as interleaver:
        run = interleaver.run if pairs else lambda forward, backward, *unused: (forward(), backward())
        run(lambda: layer(0)(x), kept.backward, *turns)
    return [*sorted(seen), torch.rand(1).tolist()]


def test_what_layers_draw_is_repeated_and_nothing_else() -> None:
    """Users' own, which draw from torch's generators."""
    row = draws_of_a_pair(False)
    assert row[1] == row[2], "the same again"
    assert draws_of_a_pair(True) == row


def test_what_torch_keeps_by_thread_is_carried_over() -> None:
    seen: dict[str, Any] = {}

    def look() -> None:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        seen.update(grad=torch.is_grad_enabled(), dtype=product.dtype, variable=VARIABLE.get())

    with Interleaver() as interleaver:
        token = VARIABLE.set(7)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            interleaver.run(lambda: None, look, MicroBatchTurn(), MicroBatchTurn())
        VARIABLE.reset(token)
        assert seen == {"grad": False, "dtype": torch.bfloat16, "variable": 7}
        interleaver.run(lambda: None, look, MicroBatchTurn(), MicroBatchTurn())
        assert seen == {"grad": True, "dtype": torch.float32, "variable": 0}


# Models that exchange -------------------------------------------------------------------------------------------------


class Exchanged(torch.autograd.Function):
    """An all-to-all as layers of experts do it: begun, handed over, waited for."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: Any, turn: CooperativeTurn | None, note: Callable[[str], None]
    ) -> Tensor:
        ctx.group, ctx.turn, ctx.note = group, turn, note
        return _exchange(rows, group, turn, note, "F")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.group, ctx.turn, ctx.note, "B"), None, None, None


def _exchange(rows: Tensor, group: Any, turn: CooperativeTurn | None, note: Callable[[str], None], kind: str) -> Tensor:
    pending = start_all_to_all_rows(rows, group)
    note(kind)
    if turn is not None:
        turn.yield_turn()
    return pending.wait()


class ExchangingLayer(nn.Module):
    """Sends half of what it makes to the other rank and back."""

    group: Any = None

    def __init__(self, layer: nn.Module, recomputes: bool) -> None:
        super().__init__()
        self.layer = layer
        self.run = Recomputed(self.compute) if recomputes else self.compute

    def compute(self, hidden: Tensor, turn: CooperativeTurn | None) -> Tensor:
        made = self.layer(hidden)  # [s, b, h]
        rows = made.flatten(0, 1)[: made.shape[0] * made.shape[1] // 2 * 2]
        there = torch.sin(Exchanged.apply(rows, self.group, turn, self.note))
        back = Exchanged.apply(there, self.group, turn, self.note)
        return made + back.view(made.shape)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.run(hidden, self.turn)

    turn: CooperativeTurn | None = None
    note: Callable[[str], None]


class ExchangingModel(StageModel):
    """A stage whose layers exchange."""

    def __init__(self, settings: Any, part: Any, group: Any, events: Events, recomputes: bool = False) -> None:
        super().__init__(settings, part)
        self.events = events
        self.layers = nn.ModuleList(ExchangingLayer(layer, recomputes) for layer in self.layers)
        for layer in self.layers:
            layer.group, layer.note = group, events.append  # type: ignore[assignment]

    def forward(self, *batch: Tensor, micro_batch: MicroBatch) -> Tensor:
        for layer in self.layers:
            layer.turn = micro_batch.turn  # type: ignore[assignment]
        return super().forward(*batch)


def forward_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    ids, labels, mask = next(data)
    mask = mask.to(next(model.parameters()).dtype)
    return model(ids, labels, mask), lambda total: (total, mask.sum().int(), {"lm loss": total.detach()})


def exchanging_step(
    dtype: torch.dtype,
    count: int,
    overlaps: bool,
    recomputes: bool = False,
    ddp: bool = True,
    sharding: str = "no_shard",
    **fields: Any,
) -> dict[str, Any]:
    """One step on this rank: gradients, reports, how exchanges followed each other, what was sent."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    stages_of_grid = fields.get("pipeline_model_parallel_size", 1)
    groups = ProcessGroupCollection.from_grid(RankGrid(world, pipeline=stages_of_grid), rank)
    settings = config(
        overlap_moe_expert_parallel_comm=overlaps, num_moe_experts=2, pipeline_dtype=dtype, num_layers=4, **fields
    )
    stages, events = stage_map(settings), list[str]()
    parts = [stages.stage_at(groups.rank("pp"), chunk) for chunk in range(stages.chunks)]
    models = [ExchangingModel(settings, part, groups.dp, events, recomputes).to(dtype) for part in parts]
    chunks: list[nn.Module] = list(models)
    if ddp:
        settings.finalize_model_grads_func = finalize_model_grads
        wrapping = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            bucket_size=40,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=sharding,
        )
        chunks = [DistributedDataParallel(settings, wrapping, model, pg_collection=groups) for model in models]
        units = [(place, unit) for place, chunk in enumerate(chunks) for unit in chunk.units]  # type: ignore[union-attr]
    rows = [batch(2 * number + groups.rank("dp"), length=LENGTH + 1) for number in range(count)]
    with recorded() as log:
        reports = get_forward_backward_func(groups.size("pp"), len(chunks))(
            forward_step_func=forward_step,
            data_iterator=[iter(rows) for _ in chunks],
            model=chunks,
            num_microbatches=count,
            seq_length=LENGTH + 1,
            micro_batch_size=2,
            pg_collection=groups,
        )
    if ddp:
        gradients = {f"{unit.plan.name} {place}": unit.gradient_shard.clone() for place, unit in units}
    else:
        gradients = {p.info.name: p.grad.clone() for model in models for p in model.parameters()}  # type: ignore[union-attr]
    return {
        "gradients": gradients,
        "reports": [report["lm loss"].item() for report in reports],
        "events": "".join(events),
        "sent": [(t.operation, t.nbytes, t.ranks) for t in log if t.operation != "receive"],
    }


def steps(cases: list[tuple[dict[str, Any], ...]]) -> list[list[dict[str, Any]]]:
    return [[exchanging_step(**case) for case in together] for together in cases]


def with_and_without(**case: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {**case, "overlaps": False}, {**case, "overlaps": True}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["gradients"].keys() == other["gradients"].keys() and one["reports"] == other["reports"]
    for name, gradient in one["gradients"].items():
        assert gradient.abs().sum() > 0 and torch.equal(gradient, other["gradients"][name]), name


@pytest.mark.slow
def test_a_step_of_pairs_is_bit_equal_to_one_without() -> None:
    cases = [
        with_and_without(dtype=dtype, count=count, recomputes=recomputes, ddp=ddp)
        for dtype, count, recomputes, ddp in (
            (torch.float64, 1, False, True),
            (torch.float32, 4, False, False),
            (torch.float32, 3, True, True),
        )
    ]
    cases.append(with_and_without(dtype=torch.float64, count=3, sharding="optim_grads"))
    cases.append(with_and_without(dtype=torch.float32, count=3, sharding="optim_grads_params", recomputes=True))
    ranks = run_on_ranks(steps, 2, cases)
    for results in ranks:
        for (_, case), (alone, paired) in zip(cases, results, strict=True):
            assert_equal(alone, paired)
            # Weights of sharded units are gathered no more often: forwards ahead, backwards behind.
            if case.get("sharding") is not None:
                assert gathers(paired) <= gathers(alone), (gathers(paired), gathers(alone))
            forward, backward, count = 2 * 4 * "F", 2 * 4 * "B", case["count"]
            if case.get("recomputes"):
                continue  # whose backward goes forward as well
            assert alone["events"] == (forward + backward) * count
            assert paired["events"] == forward + 2 * 4 * (count - 1) * "FB" + backward
    for first, second in zip(*ranks, strict=True):
        for mine, theirs in zip(first, second, strict=True):
            assert mine["sent"] == theirs["sent"]  # one order on all ranks


def gathers(result: dict[str, Any]) -> int:
    return sum(operation == "all_gather" for operation, *_ in result["sent"])


def test_late_products_hide_exchanges_and_are_the_same_numbers() -> None:
    """Each micro-batch's products come while an exchange of its own backward is under way, or at its end."""
    cases = [
        ({**case, "overlaps": False}, {**case, "overlaps": True, "delay_wgrad_compute": True})
        for case in (
            {"dtype": torch.float64, "count": 3, "recomputes": True},
            {"dtype": torch.float32, "count": 3, "sharding": "optim_grads_params"},
        )
    ]
    for results in run_on_ranks(steps, 2, cases):
        for alone, late in results:
            assert_equal(alone, late)


def test_pairs_in_an_interleaved_pipeline_are_bit_equal_too() -> None:
    pipeline = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    cases = [
        with_and_without(dtype=torch.float64, count=6, **pipeline),
        with_and_without(dtype=torch.float32, count=5, recomputes=True, ddp=False, overlap_p2p_comm=False, **pipeline),
    ]
    for results in run_on_ranks(steps, 4, cases):
        for alone, paired in results:
            assert_equal(alone, paired)
        alone, paired = results[0]
        assert paired["events"].count("FBFB") > 6 and "FBF" not in alone["events"]


class Failing(ExchangingLayer):
    """Fails in the backward of its second micro-batch."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        output = super().forward(hidden)
        if self.calls == 2:
            output.register_hook(refuse)
        return output


def refuse(gradient: Tensor) -> None:
    raise RuntimeError("this gradient is refused")


def failing_step() -> str:
    groups = ProcessGroupCollection.from_grid(RankGrid(2), torch.distributed.get_rank())
    settings = config(overlap_moe_expert_parallel_comm=True, num_moe_experts=2, num_layers=2)
    model = ExchangingModel(settings, stage_map(settings).stage_at(0), groups.dp, [])
    model.layers[1].__class__ = Failing
    with pytest.raises(RuntimeError, match="this gradient is refused") as error:
        get_forward_backward_func(1)(
            forward_step_func=forward_step,
            data_iterator=iter([batch(number, length=LENGTH + 1) for number in range(4)]),
            model=model,
            num_microbatches=4,
            pg_collection=groups,
        )
    return "".join(traceback.format_exception(error.value))


def test_an_error_in_a_paired_backward_shows_where_it_was() -> None:
    for shown in run_on_ranks(failing_step, 2):
        assert "in refuse" in shown and "in _backward" in shown
