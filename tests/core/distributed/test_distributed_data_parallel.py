"""Data parallel replicas against one process: gradients, masks, tied weights, overlap, wires."""

from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import SmallModel, batch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid

SAMPLES = 8


def groups_of_world() -> ProcessGroupCollection:
    dist = torch.distributed
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return ProcessGroupCollection.from_grid(RankGrid(world), rank)


def wrapped(model: SmallModel, **settings: Any) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True} | settings)
    return DistributedDataParallel(model.config, config, model, pg_collection=groups_of_world())


def accumulate(ddp: DistributedDataParallel, samples: range, micro_batches: int, per_token: bool) -> Tensor:
    """Gradients of this rank's share of the samples, in so many micro-batches; returns the count of tokens."""
    place, world = ddp.pg_collection.rank("dp_cp"), ddp.pg_collection.size("dp_cp")
    per = len(samples) // (world * micro_batches)
    tokens = torch.zeros(())
    for number in range(micro_batches):
        ids, labels, mask = batch(samples.start + (number * world + place) * per, rows=per)
        loss = ddp(ids, labels, mask)
        if not per_token:
            loss = loss / (per * micro_batches)
        tokens += mask.sum()
        if number < micro_batches - 1:
            with ddp.no_sync():
                loss.backward()
        else:
            loss.backward()
    return tokens


def reference_gradients(tied: bool, per_token: bool, samples: range = range(SAMPLES)) -> dict[str, Tensor]:
    """One process, one batch, plain autograd without main_grads."""
    model = SmallModel(tied=tied, per_token=per_token)
    ids, labels, mask = batch(samples.start, rows=len(samples))
    loss = model(ids, labels, mask)
    (loss / (mask.sum() if per_token else len(samples))).backward()
    return {p.info.name: p.grad for p in model.parameters()}  # type: ignore[misc]


def gradients_of(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    assert all(parameter.grad is None for parameter in ddp.parameters())
    return {p.info.name: p.main_grad.clone() for p in ddp.module.parameters()}


def two_steps(tied: bool, per_token: bool, micro_batches: int, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    ddp = wrapped(SmallModel(tied=tied, per_token=per_token), **settings)
    seen = []
    for step in range(2):
        ddp.zero_grad_buffer()
        tokens = accumulate(ddp, range(step * SAMPLES, (step + 1) * SAMPLES), micro_batches, per_token)
        finalize_model_grads([ddp], tokens if per_token else None)
        seen.append(gradients_of(ddp))
    return seen


def relative_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(((got[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)


def overlapped_and_not(world_settings: dict[str, Any]) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    runs = [two_steps(True, False, 2, world_settings | {"overlap_grad_reduce": flag}) for flag in (False, True)]
    return runs[0], runs[1]


@pytest.mark.fast("1")
@pytest.mark.parametrize("bucket_size", [1, 200, None])
def test_overlap_and_replicas_are_equal_to_the_bit(bucket_size: int | None) -> None:
    ranks = run_on_ranks(overlapped_and_not, 4, {"bucket_size": bucket_size})
    for plain, overlapped in ranks:
        for step in range(2):
            for name, value in plain[step].items():
                assert torch.equal(value, overlapped[step][name]), name
                assert torch.equal(value, ranks[0][0][step][name]), name


def test_a_step_without_a_backward_teaches_nothing() -> None:
    ddp = wrapped(SmallModel(), overlap_grad_reduce=True, bucket_size=1)
    ddp.finish_grad_sync()
    for _ in range(2):
        ddp.zero_grad_buffer()
        accumulate(ddp, range(SAMPLES), 1, per_token=False)
        ddp.finish_grad_sync()
    assert relative_error(gradients_of(ddp), reference_gradients(tied=True, per_token=False)) < 1e-11


def test_megatron_lms_methods_of_the_wrapper() -> None:
    model = SmallModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ddp = wrapped(model)
    assert list(ddp.state_dict()) == list(before)
    assert all(torch.equal(ddp.state_dict()[name], value) for name, value in before.items())
    accumulate(ddp, range(2), 1, per_token=False)
    ddp.finish_grad_sync()
    gradients = gradients_of(ddp)
    ddp.offload_grad_buffers()
    assert all(bucket.grad_buffer.untyped_storage().nbytes() == 0 for bucket in ddp._queue.buckets)
    ddp.restore_grad_buffers()
    ddp.scale_gradients(2.0)
    ddp.scale_gradients(torch.tensor(0.25))
    assert all(torch.equal(gradients_of(ddp)[name], 0.5 * value) for name, value in gradients.items())
    ddp.zero_grad_buffer()
    assert all(not value.any() for value in gradients_of(ddp).values())
    ddp.load_state_dict({name: value + 1 for name, value in before.items()})
    assert torch.equal(
        ddp.units[0].slots[0].box_view_in(ddp.units[0].param_buffer), before["embedding.table"].flatten() + 1
    )


def whole_gradients(strategy: str) -> dict[str, Tensor] | str:
    sharded = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    ddp = wrapped(SmallModel(tied=True, per_token=False), **sharded)
    accumulate(ddp, range(SAMPLES), 1, per_token=False)
    try:
        ddp.finish_grad_sync(force_all_reduce=True)
    except UserError as error:
        return str(error)
    return gradients_of(ddp)


def test_force_all_reduce_gives_every_rank_whole_gradients() -> None:
    expected = reference_gradients(tied=True, per_token=False)
    for gradients in run_on_ranks(whole_gradients, 2, "optim"):
        assert relative_error(gradients, expected) < 1e-6
    for refusal in run_on_ranks(whole_gradients, 2, "optim_grads"):
        assert "with sharded gradients no rank has whole ones" in refusal


def broadcast_from_first() -> Tensor:
    rank = torch.distributed.get_rank()
    ddp = wrapped(SmallModel(seed=100 + rank))
    ddp.broadcast_params()
    return torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])


def test_broadcast_params_gives_all_ranks_the_weights_of_the_first() -> None:
    first, second = run_on_ranks(broadcast_from_first, 2)
    expected = torch.cat([parameter.detach().flatten() for parameter in SmallModel(seed=100).parameters()])
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def test_wrapping_again_gives_gradients_to_the_new_wrapper_once() -> None:
    model = SmallModel()
    wrapped(model)
    ddp = wrapped(model)
    accumulate(ddp, range(SAMPLES), 1, per_token=False)
    ddp.finish_grad_sync()
    assert relative_error(gradients_of(ddp), reference_gradients(tied=True, per_token=False)) < 1e-11


NARROW = {"main_grads_dtype": torch.bfloat16, "grad_reduce_in_fp32": False}


def shards_of_gradients(strategy: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's shards of the gradients of a model in bfloat16, after two steps with two micro-batches."""
    sharding: dict[str, Any] = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    ddp = wrapped(SmallModel(dtype=torch.bfloat16), **sharding | settings)
    for _ in range(2):
        ddp.zero_grad_buffer()
        accumulate(ddp, range(SAMPLES), 2, per_token=False)
        ddp.finish_grad_sync()
    return {unit.plan.name: unit.gradient_shard.clone() for unit in ddp.units}


@pytest.mark.fast("no_shard-more0", "optim-more1", "optim_grads_params-more2")
@pytest.mark.parametrize("more", [{}, {"grad_reduce_in_fp32": True}, {"reduce_scatter_with_fp32_accumulation": True}])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_main_gradients_in_bfloat16(strategy: str, more: dict[str, Any]) -> None:
    """--main-grads-dtype bf16: half the bytes, and the gradients of float32 up to bfloat16's rounding."""
    wide = run_on_ranks(shards_of_gradients, 2, strategy, {})
    for found, expected in zip(run_on_ranks(shards_of_gradients, 2, strategy, NARROW | more), wide, strict=True):
        assert {shard.dtype for shard in found.values()} == {torch.bfloat16}
        widened = {name: shard.float() for name, shard in found.items()}
        assert 0 < relative_error(widened, expected) < 0.01


def test_a_wrapped_model_can_be_converted() -> None:
    """Scripts move a model with `.to(device)` after they wrap it. A CPU has no other device, but it has other types."""
    ddp = wrapped(SmallModel(tied=True, per_token=False).float()).double()
    accumulate(ddp, range(SAMPLES), 1, per_token=False)
    finalize_model_grads([ddp], None)
    found, expected = gradients_of(ddp), reference_gradients(tied=True, per_token=False)
    for name, gradient in found.items():
        assert gradient.dtype is torch.float64
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
