"""What a step adds to its micro-batches, against sums by hand."""

import dataclasses

import pytest
from support.command_lines import configured

from megatron.diagnosis.planning.cluster import Cluster
from megatron.diagnosis.planning.data_parallel import RankWeights, StepEnd, bytes_of_update, step_end
from megatron.diagnosis.planning.figures import Figure
from megatron.diagnosis.planning.gpus import gpu_named
from megatron.diagnosis.planning.kernel_time import elementwise_rate

H200 = dataclasses.replace(gpu_named("h200"), collectives=Figure(1e6, "test"))
WEIGHTS = RankWeights(dense=1e6, experts=0, largest_unit=1e5)
SHARDED = "--bf16 --use-distributed-optimizer"
BOTH = "--overlap-grad-reduce --overlap-param-gather"


def end(flags: str, ranks: int = 4, computing: float = 0.0) -> StepEnd:
    config = configured(flags, ranks=ranks)
    return step_end(config, Cluster(H200, ranks, 8, 8), WEIGHTS, 0, computing, computing, 2)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--bf16", 2 * 4 + 2 * 12 + 2),  # gradients twice; main weight and two moments read and written; the weight
        ("--bf16 --optimizer sgd", 2 * 4 + 2 * 8 + 2),
        (f"{SHARDED} --use-precision-aware-optimizer", 2 * 4 + 2 * (2 + 8) + 2),
        (f"{SHARDED} --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 2 * 4 + 2 * 6 + 2),
    ],
)
def test_bytes_of_the_update(flags: str, count: int) -> None:
    assert bytes_of_update(configured(flags)) == count


def test_a_shard_is_updated() -> None:
    whole, shard = end("--bf16").update.value, end(SHARDED).update.value
    assert whole == pytest.approx(34e6 / elementwise_rate(H200).value) and shard == pytest.approx(whole / 4)


@pytest.mark.parametrize(
    ("flags", "computing", "exposed", "hidden"),
    [
        # 1e6 weights: gradients of 4 bytes, weights of 2, of which each of 4 ranks sends three quarters
        ("--bf16", 100.0, 2 * 3.0, 0.0),
        (f"{SHARDED}", 100.0, 3.0 + 1.5, 0.0),
        (f"{SHARDED} --grad-reduce-in-bf16", 100.0, 1.5 + 1.5, 0.0),
        (f"{SHARDED} {BOTH}", 100.0, 0.1 * 4.5, 0.9 * 4.5),
        (f"{SHARDED} {BOTH}", 1.0, 2.0 + 0.5, 1.0 + 1.0),
        (
            "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
            100.0,
            2 * (1.5 + 4.5),
            0.0,
        ),
    ],
)
def test_exposed_communication(flags: str, computing: float, exposed: float, hidden: float) -> None:
    assert end(flags, computing=computing).exposed.value == pytest.approx(exposed + 0.3 * hidden, rel=1e-3)


def test_one_replica_sends_nothing() -> None:
    assert end("--bf16", ranks=1).exposed.value == 0
