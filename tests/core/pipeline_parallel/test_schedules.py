"""Megatron-LM's contract of get_forward_backward_func, on one stage."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core.pipeline_parallel.small_schedules import one_stage
from support.processes import run_on_ranks
from support.small_models import SmallModel, batch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import one_after_the_other

GLOBAL_BATCH = 8


def config(**settings: Any) -> SimpleNamespace:
    defaults = {
        "calculate_per_token_loss": False,
        "no_sync_func": None,
        "grad_scale_func": None,
        "finalize_model_grads_func": finalize_model_grads,
        "timers": None,
        "barrier_with_L1_time": False,
        "pipeline_schedule": None,
        "pipeline_model_parallel_layout": None,
        "virtual_pipeline_model_parallel_size": None,
    }
    return SimpleNamespace(**(defaults | settings))


@pytest.mark.parametrize("forward_only", [False, True])
def test_the_loop_without_a_pipeline_is_the_schedule_of_one_stage(forward_only: bool) -> None:
    for count in (1, 3):
        assert (*one_after_the_other(count, forward_only),) == one_stage(count, forward_only)


def two_values(mask: Tensor, output: Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return {"shape": tuple(mask.shape)}
    loss = output / mask.sum().clamp(min=1)
    return loss, {"lm loss": loss.detach()}


def three_values(mask: Tensor, output: Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return {"shape": tuple(mask.shape)}
    count = mask.sum().to(torch.int)
    return output, count, {"lm loss": torch.stack([output.detach(), count])}


def forward_step(loss_func: Any, iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    ids, labels, mask = next(iterator)
    return model(ids, labels, mask), (partial(loss_func, mask) if loss_func is not None else None)


def step(
    loss_func: Any, micro_batch_size: int, settings: dict[str, Any], **arguments: Any
) -> tuple[dict[str, Tensor], list[Any]]:
    dist = torch.distributed
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    groups = ProcessGroupCollection.from_grid(RankGrid(world), rank)
    model = SmallModel()
    model.config = config(**settings)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model, pg_collection=groups)
    count = GLOBAL_BATCH // (world * micro_batch_size)
    data = (batch((m * world + rank) * micro_batch_size, rows=micro_batch_size) for m in range(count))
    reports = get_forward_backward_func(pp_size=1)(
        forward_step_func=partial(forward_step, loss_func),
        data_iterator=data,
        model=[ddp],
        num_microbatches=count,
        seq_length=5,
        micro_batch_size=micro_batch_size,
        **arguments,
    )
    return {p.info.name: p.main_grad.clone() for p in model.parameters()}, reports


def expected_gradients(micro_batch_size: int, per_token: bool) -> dict[str, Tensor]:
    """Plain autograd on the definition of the step's loss."""
    model = SmallModel()
    parts = [batch(first, rows=micro_batch_size) for first in range(0, GLOBAL_BATCH, micro_batch_size)]
    sums = [(model(*part), part[2].sum()) for part in parts]
    if per_token:
        loss = sum(total for total, _ in sums) / sum(count for _, count in sums)
    else:
        loss = sum(total / count for total, count in sums) / len(sums)
    loss.backward()
    return {p.info.name: p.grad for p in model.parameters()}  # type: ignore[misc]


def error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    # The largest by torch: Python's max passes over a NaN.
    return torch.stack([(got[n] - expected[n]).norm() / expected[n].norm() for n in expected]).max().item()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("loss_func", "per_token"), [(two_values, False), (three_values, False), (three_values, True)])
def test_gradients_are_those_of_the_steps_loss(loss_func: Any, per_token: bool, world: int) -> None:
    expected = expected_gradients(2, per_token)
    for gradients, reports in run_on_ranks(step, world, loss_func, 2, {"calculate_per_token_loss": per_token}):
        assert error(gradients, expected) < 1e-11
        assert len(reports) == GLOBAL_BATCH // (2 * world)
        assert all(report["lm loss"].numel() == (1 if loss_func is two_values else 2) for report in reports)


def test_per_token_loss_does_not_depend_on_the_micro_batch_size() -> None:
    runs = [step(three_values, size, {"calculate_per_token_loss": True})[0] for size in (1, 2, 8)]
    assert max(error(run, runs[0]) for run in runs[1:]) < 1e-13


def test_the_loss_scale_reaches_gradients_and_not_reports() -> None:
    plain, reports = step(three_values, 2, {})
    scaled, scaled_reports = step(three_values, 2, {"grad_scale_func": lambda loss: loss * 1024.0})
    assert error(scaled, {name: 1024.0 * value for name, value in plain.items()}) < 1e-14
    assert all(torch.equal(a["lm loss"], b["lm loss"]) for a, b in zip(reports, scaled_reports, strict=True))


def test_forward_only_leaves_no_gradients_and_gives_reports() -> None:
    gradients, reports = step(three_values, 2, {}, forward_only=True)
    assert not any(value.any() for value in gradients.values())
    assert len(reports) == 4


def test_non_loss_data_and_outputs_are_collected() -> None:
    _, reports = step(three_values, 2, {}, forward_only=True, collect_non_loss_data=True)
    assert reports == [{"shape": (2, 5)}] * 4
    _, outputs = step(None, 2, {}, forward_only=True)
    assert all(output.shape == () and output.requires_grad for output in outputs)


def test_a_position_for_random_numbers_is_asked_for_each_micro_batch_in_order() -> None:
    seen: list[int] = []
    step(two_values, 1, {}, rng_position_of=seen.append)
    assert seen == list(range(8))


def test_reductions_are_held_back_until_the_last_micro_batch() -> None:
    events: list[str] = []

    class Held:
        def __enter__(self) -> None:
            events.append("held")

        def __exit__(self, *exception: object) -> None:
            events.append("free")

    step(
        two_values,
        2,
        {
            "no_sync_func": Held,
            "grad_scale_func": lambda loss: (events.append("backward"), loss)[1],
            "finalize_model_grads_func": lambda chunks, tokens: events.append(f"finalize {tokens}"),
        },
    )
    assert events == ["held", *["backward"] * 3, "free", "backward", "finalize None"]


def test_finalising_gets_tokens_groups_and_force_where_it_takes_them() -> None:
    seen: dict[str, Any] = {}

    def finalize(chunks: Any, tokens: Tensor, pg_collection: Any = None, force_all_reduce: bool = False) -> None:
        seen.update(tokens=int(tokens), groups=pg_collection, force=force_all_reduce)

    groups = ProcessGroupCollection.from_grid(RankGrid(1), 0)
    settings = {"calculate_per_token_loss": True, "finalize_model_grads_func": finalize}
    step(three_values, 2, settings, pg_collection=groups, force_all_reduce=True)
    tokens = sum(int(batch(i)[2].sum()) for i in range(GLOBAL_BATCH))
    assert seen == {"tokens": tokens, "groups": groups, "force": True}


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(UserError, match=r"--calculate-per-token-loss needs a loss function that returns three values"):
        step(two_values, 2, {"calculate_per_token_loss": True})
    two = [SmallModel(), SmallModel()]
    two[0].config = config(pipeline_model_parallel_size=1)
    with pytest.raises(UserError, match=r"model is a list of 2, while the config says 1"):
        get_forward_backward_func()(forward_step_func=forward_step, data_iterator=None, model=two, num_microbatches=1)


def masked_means_over_context_parts() -> dict[str, Tensor]:
    """One sequence cut over two context parallel ranks whose counts of tokens differ."""
    rank = torch.distributed.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(2, context=2), rank)
    model = SmallModel()
    model.config = config()
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model, pg_collection=groups
    )
    ids, labels, mask = batch(0, rows=2, length=6)
    part = slice(0, 2) if rank == 0 else slice(2, 6)
    data = iter([(ids[:, part], labels[:, part], mask[:, part])])
    get_forward_backward_func(pp_size=1)(
        forward_step_func=partial(forward_step, three_values),
        data_iterator=data,
        model=ddp,
        num_microbatches=1,
        pg_collection=groups,
    )
    return {p.info.name: p.main_grad.clone() for p in model.parameters()}


def test_the_masked_mean_is_over_all_context_parallel_parts() -> None:
    model = SmallModel()
    ids, labels, mask = batch(0, rows=2, length=6)
    (model(ids, labels, mask) / mask.sum()).backward()
    expected: dict[str, Tensor] = {p.info.name: p.grad for p in model.parameters()}  # type: ignore[misc]
    for gradients in run_on_ranks(masked_means_over_context_parts, 2):
        assert error(gradients, expected) < 1e-11
