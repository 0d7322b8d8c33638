"""Bytes and exposed time of the communication of a micro-batch, against sums by hand."""

import dataclasses

import pytest
from support.command_lines import configured

from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.diagnosis.planning.cluster import Cluster
from megatron.diagnosis.planning.exposed import (
    Exposed,
    bytes_of_keys,
    bytes_one_way,
    exposed_of,
    slowed_by,
    way_of_context,
)
from megatron.diagnosis.planning.figures import Figure
from megatron.diagnosis.planning.gpus import gpu_named
from megatron.diagnosis.planning.layer_work import stage_work
from megatron.training.config.pretrain_config import PretrainConfig

# A rate so low that the latency of a collective does not count: 1 kB/s.
SLOW = Cluster(dataclasses.replace(gpu_named("h200"), collectives=Figure(1e3, "test")), 8, 8, 8)
UNIT = 2 * 128 * 64 * 2  # the hidden states of a micro-batch of two samples, in bytes
EXPERTS = (
    "--bf16 --num-experts 8 --moe-grouped-gemm --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--expert-model-parallel-size 4 --moe-token-dispatcher-type "
)


def exposed(config: PretrainConfig, attention: float = 0.0) -> list[Exposed]:
    (stage,) = stage_map(config.transformer).stages
    work = stage_work(config, stage, 128)
    return exposed_of(config, stage, work, SLOW, Figure(attention, "test"), 0)


def test_a_run_without_groups_sends_nothing() -> None:
    assert exposed(configured("--bf16", ranks=2)) == []


@pytest.mark.parametrize(
    ("flags", "forward", "backward", "hidden"),
    [
        # 2 layers of 2 pairs; embedding and head add 1.5 exchanges each way.
        ("--sequence-parallel", 2 * 4 + 1.5, 4 + 1.5, 2 * 4 + 1.5),
        ("--sequence-parallel --tp-comm-overlap", 4 + 1.5, 2 + 1.5, 2 * 4 + 1.5 + 6),
        ("", 2 * 4 + 3, 1.5, 2 * 4),
    ],
)
def test_tensor_parallel(flags: str, forward: float, backward: float, hidden: float) -> None:
    (found,) = exposed(configured(f"--bf16 --tensor-model-parallel-size 2 {flags}", ranks=2))
    once = UNIT / 2 / 1e3
    assert found.forward.value == pytest.approx(forward * once, rel=1e-4)
    slowed = slowed_by(Figure(hidden * once, "")).value
    assert found.backward.value == pytest.approx(backward * once + slowed, rel=1e-4)


@pytest.mark.parametrize(
    ("dispatcher", "times"),
    [
        ("allgather", 3.0),
        ("alltoall", 2 * 3 / 4),
        # Both experts of a token are among 2 of 8: it is sent unless both are among the other 6.
        ("flex", 3 * (1 - 15 / 28)),
    ],
)
def test_expert_parallel(dispatcher: str, times: float) -> None:
    config = configured(EXPERTS + dispatcher, ranks=4)
    assert bytes_one_way(config, 4) == pytest.approx(UNIT * times)
    (found,) = exposed(config)
    seconds = 2 * 2 * UNIT * times / 1e3
    assert found.forward.value == found.backward.value == pytest.approx(seconds, rel=1e-4)
    (hidden,) = exposed(configured(f"{EXPERTS}{dispatcher} --delay-wgrad-compute", ranks=4))
    assert hidden.backward.value == pytest.approx(seconds / 2 + slowed_by(Figure(seconds / 2, "")).value, rel=1e-4)


def test_context_parallel() -> None:
    config = configured("--bf16 --context-parallel-size 2", ranks=2)
    keys = UNIT / 2 * 2  # keys and values, of half of the tokens
    assert bytes_of_keys(config) == keys and way_of_context(config) == "p2p"
    sent = 2 * keys / 1e3  # 2 layers, to one other rank
    (found,) = exposed(config)
    assert found.forward.value == pytest.approx(sent, rel=1e-3)
    (hidden,) = exposed(config, attention=100 * sent)
    assert hidden.forward.value == 0 and hidden.backward.value == pytest.approx(
        slowed_by(Figure(3 * sent, "")).value, rel=1e-3
    )
