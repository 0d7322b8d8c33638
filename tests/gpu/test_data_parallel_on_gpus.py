"""Data parallel ranks over nccl: gradients against one process, replicas equal to the bit, flags agreed on."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpus import two_ranks
from support.small_models import SmallModel, batch
from torch import Tensor

from megatron.core.communication.peer_memory import WITHOUT_SHARED_MEMORY
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters import info_of
from megatron.core.timers import Timers
from megatron.facades import parallel_state

ROOT = Path(__file__).parents[2]
SAMPLES = 8

pytestmark = [
    pytest.mark.gpu,
    two_ranks,
]


def on_this_rank(average: bool, per_token: bool, overlap: bool) -> dict[str, Any]:
    """Two steps of a float64 model; what this rank saw."""
    rank, world = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    model = SmallModel(per_token=per_token).cuda()
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, average_in_collective=average, overlap_grad_reduce=overlap, bucket_size=1
    )
    ddp = DistributedDataParallel(model.config, settings, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=0.5), [ddp])
    seen: dict[str, Any] = {"gradients": [], "applied": []}
    for step in range(2):
        ddp.zero_grad_buffer()
        per = SAMPLES // world
        ids, labels, mask = (t.cuda() for t in batch(step * SAMPLES + rank * per, rows=per))
        loss = ddp(ids, labels, mask)
        (loss if per_token else loss / per).backward()
        finalize_model_grads([ddp], mask.sum() if per_token else None)
        seen["gradients"].append({info_of(p).name: p.main_grad.cpu().clone() for p in ddp.parameters()})
        # Step 1: the loss of one rank alone is called not finite, so no rank may update.
        finite = torch.tensor(step == 0 or rank == 0, device="cuda")
        seen["applied"].append(bool(optimizer.step_on_device(finite).update_applied))
    seen["weights"] = {info_of(p).name: p.detach().cpu() for p in ddp.parameters()}
    return seen


def fully_sharded(shares: bool) -> tuple[bool, list[Tensor]]:
    """Three steps with sharded weights; whether ranks copied them from each other's memory, and what this rank has."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if not shares:
        WITHOUT_SHARED_MEMORY.add(group)
    model = SmallModel().cuda()
    settings = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    ddp = DistributedDataParallel(model.config, settings, model)
    WITHOUT_SHARED_MEMORY.discard(group)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=0.5), [ddp])
    for step in range(3):
        ddp.zero_grad_buffer()
        ids, labels, mask = (t.cuda() for t in batch(2 * step + dist.get_rank()))
        ddp(ids, labels, mask).backward()
        finalize_model_grads([ddp])
        optimizer.step_on_device(torch.tensor(True, device="cuda"))
    copied = all(unit._peers is not None for unit in ddp.units)
    return copied, [unit.weight_shard.cpu() for unit in ddp.units]


def main(answers: Path) -> None:
    parallel_state.initialize_model_parallel()
    seen = {case: on_this_rank(*case) for case in ((False, False, False), (True, False, True), (False, True, True))}
    timers = Timers(1, "minmax")
    timers("step", log_level=1).start(barrier=True)
    timers("step").stop()
    sharded = [fully_sharded(shares) for shares in (True, False)]
    text = timers.get_all_timers_string(["step"], barrier=True)
    host = torch.ones(1)
    dist.all_reduce(host, group=parallel_state.get_data_parallel_group_gloo())
    (answers / f"{dist.get_rank()}").write_bytes(pickle.dumps((seen, text, float(host), sharded)))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    answers = tmp_path_factory.mktemp("answers")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launcher, __file__, str(answers)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [pickle.loads((answers / str(rank)).read_bytes()) for rank in range(2)]


def reference(per_token: bool, step: int, weights: dict[str, Tensor] | None) -> dict[str, Tensor]:
    model = SmallModel(per_token=per_token)
    if weights is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(weights[info_of(parameter).name])
    ids, labels, mask = batch(step * SAMPLES, rows=SAMPLES)
    (model(ids, labels, mask) / (mask.sum() if per_token else SAMPLES)).backward()
    return {info_of(p).name: p.grad for p in model.parameters()}  # type: ignore[misc]


def error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(((got[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)


def test_gradients_replicas_and_agreement(ranks: list[Any]) -> None:
    for case in ranks[0][0]:
        first, second = (seen[case] for seen, *_ in ranks)
        assert first["applied"] == second["applied"] == [True, False]
        for step in range(2):
            for name, value in first["gradients"][step].items():
                assert torch.equal(value, second["gradients"][step][name]), (case, name)
        assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
        assert error(first["gradients"][0], reference(case[1], 0, None)) < 1e-11
        # The second step was not applied: its gradients are those of the weights that were kept.
        assert error(first["gradients"][1], reference(case[1], 1, first["weights"])) < 1e-11


def test_timers_and_host_tensors_cross_ranks(ranks: list[Any]) -> None:
    assert all(text is not None and "step" in text and host == 2.0 for _, text, host, _ in ranks)


def test_copies_of_weights_equal_collectives_to_the_bit(ranks: list[Any]) -> None:
    for *_, ((copied, by_copies), (collected, by_collectives)) in ranks:
        assert copied and not collected
        assert all(torch.equal(*pair) for pair in zip(by_copies, by_collectives, strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
