"""Pipelines on real processes against one process, float64: losses and the gradient of every parameter."""

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from core.pipeline_parallel.stage_models import LENGTH, StageModel, batch, config, whole_model
from support.processes import run_on_ranks
from torch import Tensor, nn

from megatron.core.communication.traffic import recorded
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.micro_batch import MicroBatch
from megatron.core.ops.attached_loss import attach_loss
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.tokens import RngPosition


def loss_func(mask: Tensor, total: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return total, mask.sum().to(torch.int), {"lm loss": torch.stack([total.detach(), mask.sum()])}


def forward_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    ids, labels, mask = next(data)
    return model(ids, labels, mask), partial(loss_func, mask)


def expected(count: int, num_layers: int = 8, lengths: Any = None) -> tuple[dict[str, Tensor], list[float]]:
    """Plain autograd over the definition of the step's loss."""
    model = whole_model(num_layers)
    parts = [batch(number, length=lengths[number] if lengths else LENGTH) for number in range(count)]
    sums = [(model(*part), part[2].sum()) for part in parts]
    (sum(total / tokens for total, tokens in sums) / count).backward()  # type: ignore[union-attr]
    return {p.info.name: p.grad for p in model.parameters()}, [total.item() for total, _ in sums]  # type: ignore[attr-defined]


def run_cases(cases: list[tuple[int, dict[str, Any]]]) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Every case on this rank: gradients by name, and reported sums of losses."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(world, pipeline=world), rank)
    return [run_case(groups, count, dict(fields)) for count, fields in cases]


def run_case(
    groups: ProcessGroupCollection, count: int, fields: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float]]:
    lengths, bare = fields.pop("lengths", None), fields.pop("bare", False)
    settings = config(pipeline_model_parallel_size=groups.size("pp"), **fields)
    stages = stage_map(settings)
    models = [StageModel(settings, stages.stage_at(groups.rank("pp"), chunk)) for chunk in range(stages.chunks)]
    chunks: list[nn.Module] = list(models)
    if not bare:
        settings.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig()
        chunks = [DistributedDataParallel(settings, ddp, model, pg_collection=groups) for model in models]
    parts = [batch(number, length=lengths[number] if lengths else LENGTH) for number in range(count)]
    reports = get_forward_backward_func(groups.size("pp"), stages.chunks)(
        forward_step_func=forward_step,
        data_iterator=[iter(parts) for _ in chunks],
        model=chunks,
        num_microbatches=count,
        seq_length=LENGTH,
        micro_batch_size=2,
        pg_collection=groups,
    )
    gradients = {
        p.info.name: (p.grad if bare else p.main_grad).clone()
        for model in models
        for p in model.parameters()  # type: ignore[union-attr]
    }
    return gradients, [float(report["lm loss"][0]) for report in reports]


SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "interleaved": {"virtual_pipeline_model_parallel_size": 2},
    "zb-v": {"pipeline_schedule": "zb-v"},
}


# Parity cells have the schedules on four ranks.
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_schedules_compute_what_one_process_does(world: int) -> None:
    counts = (1, 3, 6)
    cases = [(count, fields) for count in counts for fields in SCHEDULES.values()]
    cases += [(5, {**fields, "overlap_p2p_comm": False}) for fields in SCHEDULES.values()]
    cases += [(5, {**fields, "bare": True}) for fields in SCHEDULES.values()]
    lengths = [3, 7, 4, 6, 2]
    cases += [(5, {**fields, "variable_seq_lengths": True, "lengths": lengths}) for fields in SCHEDULES.values()]
    if world == 2:
        cases += [
            (5, {"num_layers_in_first_pipeline_stage": 6}),
            (5, {"pipeline_model_parallel_layout": "E|tt|t*5|tL"}),
            (5, {"pipeline_model_parallel_layout": "E|tt|t*5|tL", "pipeline_schedule": "zb-v"}),
            (7, {"virtual_pipeline_model_parallel_size": 4, "microbatch_group_size_per_vp_stage": 3}),
        ]
    check(cases, run_on_ranks(run_cases, world, cases))


def check(cases: list[Any], results: list[Any]) -> None:
    for place, (count, fields) in enumerate(cases):
        gradients, losses = expected(count, lengths=fields.get("lengths"))
        found: dict[str, Tensor] = {}
        for rank in results:
            found |= rank[place][0]
        assert found.keys() == gradients.keys(), fields
        for name, gradient in gradients.items():
            assert ((found[name] - gradient).norm() / gradient.norm()).item() < 1e-12, (name, count, fields)
        loss_rank = 0 if fields.get("pipeline_schedule") == "zb-v" else len(results) - 1
        for rank, result in enumerate(results):
            assert result[place][1] == (pytest.approx(losses, rel=1e-13) if rank == loss_rank else []), (rank, fields)


# What goes around the numbers -----------------------------------------------------------------------------------------


class Watched(StageModel):
    """Tells what happens to it."""

    events: list[str]
    placed: list[tuple[int, int]]
    auxiliary = False

    def forward(self, *batch: Tensor, micro_batch: MicroBatch) -> Tensor:
        self.events.append(f"F.{self.number}")
        output = super().forward(*batch)
        if self.auxiliary:
            output = attach_loss(output, sum(p.pow(2).sum() for p in self.parameters()), micro_batch.auxiliary_scale)
        self.output = weakref.ref(output)
        if micro_batch.rng_position is not None:
            self.placed.append((micro_batch.rng_position.first_sample, self.number))
        return output


def watched_chunks(groups: ProcessGroupCollection, settings: Any, events: list[str]) -> list[Watched]:
    stages = stage_map(settings)
    chunks = []
    for number in range(stages.chunks):
        chunk = Watched(settings, stages.stage_at(groups.rank("pp"), number))
        chunk.number, chunk.events, chunk.placed = number, events, []
        chunks.append(chunk)
    return chunks


def run_step(groups: ProcessGroupCollection, chunks: list[Watched], count: int = 3, **arguments: Any) -> list[Any]:
    return get_forward_backward_func(groups.size("pp"), len(chunks))(
        **{
            "forward_step_func": forward_step,
            "data_iterator": [iter([batch(number) for number in range(count)]) for _ in chunks],
            "model": chunks,
            "num_microbatches": count,
            "seq_length": LENGTH,
            "micro_batch_size": 2,
            "pg_collection": groups,
            **arguments,
        }
    )


def pipeline_groups() -> ProcessGroupCollection:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return ProcessGroupCollection.from_grid(RankGrid(world, pipeline=world), rank)


def hooks_of_two_chunks() -> dict[str, Any]:
    """Order and arguments of the calls of Megatron-LM's hooks."""
    events: list[str] = []
    groups = pipeline_groups()
    settings = config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)

    @contextlib.contextmanager
    def held(number: int) -> Iterator[None]:
        events.append(f"held.{number}")
        yield
        events.append(f"free.{number}")

    chunks = watched_chunks(groups, settings, events)
    numbers = {id(next(chunk.parameters())): chunk.number for chunk in chunks}

    def started(what: str, number: int, parameters: Iterator[nn.Parameter]) -> None:
        assert numbers[id(next(iter(parameters)))] == number
        events.append(f"{what}.{number}")

    settings.no_sync_func = [partial(held, 0), partial(held, 1)]
    settings.grad_sync_func = [partial(started, "reduce", 0), partial(started, "reduce", 1)]
    settings.param_sync_func = [partial(started, "gather", 0), partial(started, "gather", 1)]
    settings.calculate_per_token_loss = True
    tokens: list[Tensor] = []
    settings.finalize_model_grads_func = lambda models, total: (events.append("finalize"), tokens.append(total))
    run_step(groups, chunks, rng_position_of=lambda number: RngPosition(1, 2, number))
    placed = [place for chunk in chunks for place in chunk.placed]
    hidden = [chunk.output() is None for chunk in chunks]
    return {"events": events, "placed": placed, "tokens": tokens[0], "dtype": tokens[0].dtype, "hidden": hidden}


def test_hooks_of_chunks_are_called_in_their_places() -> None:
    first, second = run_on_ranks(hooks_of_two_chunks, 2)
    for rank in (first, second):
        calls = [event for event in rank["events"] if event[0] != "F"]
        assert calls == ["held.0", "held.1", "gather.1", "free.1", "reduce.1", "free.0", "reduce.0", "finalize"]
        assert rank["events"].index("gather.1") < rank["events"].index("F.0")
        assert sorted(rank["placed"]) == [(number, chunk) for number in range(3) for chunk in range(2)]
        assert rank["dtype"] is torch.float64
    # The tokens of all micro-batches where the loss is, zero elsewhere: their sum over the pipeline is the count.
    assert (int(first["tokens"]), int(second["tokens"])) == (0, int(sum(batch(n)[2].sum() for n in range(3))))
    # What was sent is not kept: only the edge by which its gradient comes in.
    assert first["hidden"] == [True, True] and second["hidden"][0]


def auxiliary_losses(schedule: dict[str, Any]) -> dict[str, Tensor]:
    groups = pipeline_groups()
    chunks = watched_chunks(
        groups, config(pipeline_model_parallel_size=2, grad_scale_func=lambda x: 8 * x, **schedule), []
    )
    for chunk in chunks:
        chunk.auxiliary = True
    run_step(groups, chunks)
    return {p.info.name: p.grad.clone() for chunk in chunks for p in chunk.parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_what_stages_add_to_the_loss_counts_once_a_micro_batch(schedule: str) -> None:
    """A stage that is not the last adds to the loss too, by the same scale."""
    gradients, _ = expected(3)
    found: dict[str, Tensor] = {}
    for rank in run_on_ranks(auxiliary_losses, 2, SCHEDULES[schedule]):
        found |= rank
    for name, parameter in whole_model().named_parameters():
        info = parameter.info.name  # type: ignore[attr-defined]
        wanted = 8 * (gradients[info] + 2 * parameter.detach())
        assert ((found[info] - wanted).norm() / wanted.norm()).item() < 1e-12, name


def evaluate_and_record(schedule: dict[str, Any]) -> dict[str, Any]:
    groups = pipeline_groups()
    chunks = watched_chunks(groups, config(pipeline_model_parallel_size=2, **schedule), [])
    with recorded() as evaluation, torch.no_grad():
        reports = run_step(groups, chunks, forward_only=True)
    collected = run_step(groups, chunks, forward_only=True, collect_non_loss_data=True, forward_step_func=non_loss_step)
    with recorded() as training:
        run_step(groups, chunks)
    traffic = [sum(t.operation == "send" for t in log) for log in (evaluation, training)]
    kinds = {(t.dtype, t.nbytes, t.ranks) for t in training if t.operation == "send"}
    return {
        "reports": [float(r["lm loss"][0]) for r in reports],
        "collected": collected,
        "sent": traffic,
        "kinds": kinds,
    }


def non_loss_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    return model(*next(data)), lambda output, non_loss_data: ("collected", non_loss_data)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_evaluation_goes_forward_only_and_messages_are_as_large_as_hidden_states(schedule: str) -> None:
    results = run_on_ranks(evaluate_and_record, 2, SCHEDULES[schedule])
    _, losses = expected(3)
    loss_rank = 0 if schedule == "zb-v" else 1
    assert results[loss_rank]["reports"] == pytest.approx(losses, rel=1e-13)
    assert results[loss_rank]["collected"] == [("collected", True)] * 3
    assert results[1 - loss_rank]["reports"] == results[1 - loss_rank]["collected"] == []
    # Between ranks: three crossings down the four stages in turn, two where they form a V; as many up.
    crossings = 3 * (3 if schedule == "interleaved" else 2)
    assert sum(result["sent"][0] for result in results) == crossings
    assert sum(result["sent"][1] for result in results) == 2 * crossings
    for rank, result in enumerate(results):
        assert result["kinds"] == {(torch.float64, LENGTH * 2 * 6 * 8, (rank, 1 - rank))}


def refusals() -> list[str]:
    """Messages of what this rank cannot run; nothing is sent before each."""
    groups, messages = pipeline_groups(), []

    def refused(settings: Any, **arguments: Any) -> None:
        chunks = arguments.pop("chunks", None) or watched_chunks(groups, settings, [])
        with pytest.raises(UserError) as error:
            run_step(groups, chunks, **arguments)
        messages.append(str(error.value))

    pair = config(pipeline_model_parallel_size=2)
    refused(pair, seq_length=None)
    refused(pair, data_iterator=[None, None])
    refused(config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), data_iterator=iter([]))
    refused(pair, chunks=2 * watched_chunks(groups, pair, []))
    refused(pair, p2p_communicator=object())
    if groups.rank("pp") == 0:
        refused(pair, micro_batch_size=1, count=1)
        refused(config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32), count=1)
    return messages


def test_what_cannot_be_run_is_refused() -> None:
    first, second = run_on_ranks(refusals, 2)
    assert first[:5] == second
    for message, part in zip(
        first,
        (
            "needs seq_length and micro_batch_size",
            "data_iterator is a list of 2 for 1 model chunks",
            "data_iterator is a single one for 2 model chunks",
            "model is a list of 2, while the config says 1",
            "p2p_communicator",
            "gives hidden states of shape (5, 2, 6), while seq_length and micro_batch_size say (5, 1, 6)",
            "gives hidden states in torch.float64, and config.pipeline_dtype torch.float32 would round",
        ),
        strict=True,
    ):
        assert part in message
