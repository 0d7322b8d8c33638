"""Whole runs with interleaved micro-batches, bit-equal to runs with micro-batches one after the other."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.processes import run_on_ranks
from support.runs import TensorSlice, differences, train

from megatron.core.communication.traffic import recorded
from megatron.core.distributed.main_grad import WeightGradientQueue

EXPERTS = (
    "--mock-data --train-iters 2 --eval-iters 0 --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --swiglu "
    "--moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01 --hidden-dropout 0.1 --attention-dropout 0.1 "
)
TURNS = "--overlap-moe-expert-parallel-comm"
LATE = "--delay-wgrad-compute"


def run_recorded(flags: str) -> dict[str, Any]:
    with recorded() as log:
        outcome = train(EXPERTS + flags)
    assert outcome.decision is None or not outcome.decision.code  # type: ignore[attr-defined]
    return {
        "state": by_name(outcome.slices_at_end),
        "losses": [step.losses for step in outcome.steps],
        "norms": [step.grad_norm for step in outcome.steps],
        "sent": [(t.operation, str(t.dtype), t.nbytes, t.ranks) for t in log if t.operation != "receive"],
    }


def by_name(slices: list[TensorSlice]) -> dict[str, torch.Tensor]:
    return {
        f"{tensor_slice.name} {tensor_slice.box} {tensor_slice.start}": tensor_slice.values for tensor_slice in slices
    }


def run_all(flags: list[str]) -> list[dict[str, Any]]:
    return [run_recorded(each) for each in flags]


def check(world: int, layout: str, flags: list[str]) -> None:
    for alone, *others in run_on_ranks(run_all, world, [layout, *(f"{layout} {more}" for more in flags)]):
        for paired, given in zip(others, flags, strict=True):
            assert paired["losses"] == alone["losses"] and paired["norms"] == alone["norms"]
            assert alone["state"] and differences(alone["state"], paired["state"]) == []
            # The same is sent, in another order: forwards' and backwards' exchanges take turns. (Whose weights are
            # gathered once for a backward that follows its forward differs.)
            exchanges = {"all_to_all"} if "shard" in layout else {"all_to_all", "all_gather", "reduce_scatter"}
            ours, theirs = ([s for s in run["sent"] if s[0] in exchanges] for run in (alone, paired))
            assert Counter(ours) == Counter(theirs) and (ours != theirs or TURNS not in given)


QUICK = "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 16 --moe-token-dispatcher-type alltoall"

LAYOUTS = {
    "experts by channels": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 "
        "--moe-token-dispatcher-type allgather --moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap",
    ),
    "dense layers between, recomputed": (
        2,
        "--num-layers 4 --expert-model-parallel-size 2 --moe-layer-freq 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --fp64",
    ),
    "parts recomputed": (
        2,
        f"{QUICK} --untie-embeddings-and-output-weights --recompute-granularity selective "
        "--recompute-modules moe layernorm",
    ),
    "other parts recomputed": (
        2,
        f"{QUICK} --recompute-granularity selective --recompute-modules core_attn moe_act layernorm shared_experts",
    ),
    "virtual stages": (
        4,
        "--num-layers 4 --global-batch-size 10 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --untie-embeddings-and-output-weights",
    ),
    "sharded weights": (
        2,
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather "
        "--use-distributed-optimizer",
    ),
    "sharded optimizer": (
        4,
        "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --moe-token-dispatcher-type alltoall "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-expert-capacity-factor 1.0",
    ),
    "latent attention, predicting further ahead": (
        2,
        "--expert-model-parallel-size 2 --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 "
        "--qk-pos-emb-head-dim 4 --v-head-dim 8 --mtp-num-layers 1 --position-embedding-type rope",
    ),
}


def test_a_run_whose_micro_batches_take_turns_is_bit_equal() -> None:
    check(2, QUICK, [f"{TURNS} {LATE}", LATE])


def products_during_exchanges(flags: str) -> list[int]:
    """Trains, and returns how many weight gradients each backward exchange of tokens was hidden behind."""
    compute, hidden = WeightGradientQueue.compute_deferred, list[int]()

    def counted(queue: WeightGradientQueue) -> None:
        hidden.append(sum(map(len, queue._waiting.values())))
        compute(queue)

    with patch.object(WeightGradientQueue, "compute_deferred", counted):
        train(f"{EXPERTS} {flags} --num-layers 2 --train-iters 1 --global-batch-size 2")
    return hidden


@pytest.mark.slow
def test_a_backward_alone_computes_weight_gradients_during_its_exchanges() -> None:
    for layout in ("alltoall", "allgather", "flex"):
        flags = f"--expert-model-parallel-size 2 --moe-token-dispatcher-type {layout}"
        none, hidden = run_on_ranks(in_turn, 2, [flags, f"{flags} {LATE}"])[0]
        assert none == []
        # Each layer's combine waits behind the layer after it, its dispatch behind its own experts; then the end.
        assert len(hidden) == 5 and hidden[1] == hidden[3] == 2 and all(hidden), hidden


def in_turn(flags: list[str]) -> list[list[int]]:
    return [products_during_exchanges(each) for each in flags]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_more_runs_are_bit_equal(name: str) -> None:
    check(*LAYOUTS[name], [TURNS, f"{TURNS} {LATE}", LATE])


def test_where_there_is_nothing_to_hide_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    alone = train(f"{EXPERTS} --train-iters 1")
    assert "no exchange to hide" not in capsys.readouterr().out
    paired = train(f"{EXPERTS} --train-iters 1 {TURNS}")
    assert "every rank has all experts whole, so there is no exchange to hide" in capsys.readouterr().out
    assert alone.weights and differences(alone.weights, paired.weights) == []
