"""Whole runs with `--delay-wgrad-compute`: bit-equal to runs without it, and exchanges run behind weight gradients."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.processes import run_on_ranks
from support.runs import differences, train

from megatron.core.communication.traffic import recorded
from megatron.core.distributed.main_grad import WeightGradientQueue

EXPERTS = (
    "--mock-data --train-iters 2 --eval-iters 0 --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --swiglu "
    "--moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01 --hidden-dropout 0.1 --attention-dropout 0.1 "
)
LATE = "--delay-wgrad-compute"
QUICK = "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 16 --moe-token-dispatcher-type alltoall"


def run_recorded(flags: str) -> dict[str, Any]:
    """Trains. Returns what must be equal, and how many weight gradients each exchange of backward was hidden behind."""
    compute, hidden = WeightGradientQueue.compute_deferred, list[int]()

    def counted(queue: WeightGradientQueue) -> None:
        hidden.append(sum(map(len, queue._waiting.values())))
        compute(queue)

    with recorded() as log, patch.object(WeightGradientQueue, "compute_deferred", counted):
        outcome = train(EXPERTS + flags)
    state: dict[str, torch.Tensor] = {f"{s.name} {s.box} {s.start}": s.values for s in outcome.slices_at_end}
    return {
        "state": state,
        "losses": [step.losses for step in outcome.steps],
        "norms": [step.grad_norm for step in outcome.steps],
        "sent": Counter((t.operation, str(t.dtype), t.nbytes, t.ranks) for t in log if t.operation != "receive"),
        "hidden": hidden,
    }


def run_both(layout: str) -> list[dict[str, Any]]:
    return [run_recorded(layout), run_recorded(f"{layout} {LATE}")]


def check(world: int, layout: str) -> None:
    for both in run_on_ranks(run_both, world, layout):
        plain, late = both
        assert late["losses"] == plain["losses"] and late["norms"] == plain["norms"]
        # With sharded gradients a unit that is complete too late is reduced in two parts, in the first step.
        sent = [{s: n for s, n in run["sent"].items() if "shard" not in layout or s[0] == "all_to_all"} for run in both]
        assert sent[0] == sent[1] != {}
        assert plain["state"] and differences(plain["state"], late["state"]) == []
        assert plain["hidden"] == [] and len(set(late["hidden"])) > 1  # not all at the end of a backward


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
    "latent attention, predicting further ahead": (
        2,
        "--expert-model-parallel-size 2 --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 "
        "--qk-pos-emb-head-dim 4 --v-head-dim 8 --mtp-num-layers 1 --position-embedding-type rope",
    ),
}


def test_a_run_that_delays_weight_gradients_is_bit_equal() -> None:
    check(2, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_more_runs_are_bit_equal(name: str) -> None:
    check(*LAYOUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_a_backward_computes_weight_gradients_during_its_exchanges(dispatcher: str) -> None:
    flags = f"--expert-model-parallel-size 2 --moe-token-dispatcher-type {dispatcher} {LATE}"
    flags += " --num-layers 2 --train-iters 1 --global-batch-size 2"
    hidden = run_on_ranks(run_recorded, 2, flags)[0]["hidden"]
    # Each layer's combine waits behind the layer after it, its dispatch behind its own experts; then the end.
    assert len(hidden) == 5 and hidden[1] == hidden[3] == 2 and all(hidden), hidden
