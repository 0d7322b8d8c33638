"""Checkpoints of experts: saved in one split of experts and loaded in any other, bit-equal, with grouped products and
without."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.runs import TINY, Outcome, logger_of, state_at_end, train, train_on_ranks
from training.test_checkpoints_across_layouts import (
    PP,
    SHARDED,
    TP,
    ZERO_3,
    check_continues,
    check_equal,
    weights_for_use,
)

MODEL = (
    f"{TINY} --num-layers 4 --num-attention-heads 4 --num-experts 4 --moe-ffn-hidden-size 24 "
    "--moe-layer-freq [0,1,1,1] --swiglu --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-shared-expert-intermediate-size 16 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall"
)
EP, ETP, GROUPED = "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--moe-grouped-gemm"
TP2_PP2_EP2 = f"{TP} 2 --sequence-parallel {PP} 2 {EP} 2 {ETP} 1 {SHARDED}"

QUICK = {
    "stages, tensor and expert parallel": (4, TP2_PP2_EP2),
    "experts cut": (2, f"{TP} 2 --sequence-parallel {ETP} 2"),
    "weights sharded, grouped": (2, f"{EP} 2 {ZERO_3} {GROUPED}"),
}
SLOW = {
    "stages, tensor and expert parallel": (8, TP2_PP2_EP2),
    "one process, grouped": (1, GROUPED),
    "one process": (1, ""),
    "an expert a rank, grouped": (4, f"{EP} 4 {GROUPED} {SHARDED}"),
    "an expert a rank": (4, f"{EP} 4"),
    "experts cut": (4, f"{TP} 2 --sequence-parallel {ETP} 2 {EP} 2 {GROUPED}"),
    "weights sharded": (4, f"{EP} 2 {ZERO_3}"),
    "weights sharded, an expert a rank, grouped": (8, f"{EP} 4 {ZERO_3} {GROUPED}"),
    "stages with virtual ones": (8, f"{PP} 2 --num-layers-per-virtual-pipeline-stage 1 {EP} 4 {SHARDED}"),
    "back": (8, TP2_PP2_EP2),
}


EXPERTS = "decoder.layers.2.mlp.experts.linear_fc1.weight"


def run_chain(layouts: Iterable[tuple[int, str]], flags: str, folder: Path) -> Iterator[list[Outcome]]:
    """A run that does one iteration in each layout and continues in the next from bit-equal state."""
    flags = f"{flags} --eval-iters 0 --save {folder} --load {folder} --train-iters 20 --exit-interval"
    saved = None
    for iteration, (size, layout) in enumerate(layouts, start=1):
        ranks = train_on_ranks(f"{flags} {iteration} {layout}", size, base=MODEL)
        if saved is not None:
            check_continues(ranks, saved)
        saved = ranks
        yield ranks


def test_from_stages_of_shared_experts_into_others_and_back(corpus, tmp_path):
    """The losses equal those of a run in one process."""
    flags = f"--fp64 --data-path {corpus}"
    straight = train(f"{flags} --eval-iters 0 --train-iters 20 --exit-interval {len(QUICK)}", base=MODEL)
    ranks = list(run_chain(QUICK.values(), flags, tmp_path))
    assert [logger_of(each).losses[0] for each in ranks] == pytest.approx(straight.losses, rel=1e-11)
    state = state_at_end(ranks[0])
    assert {f"optimizer.{kind}.{EXPERTS}" for kind in ("exp_avg", "exp_avg_sq")} <= state.keys()
    assert state[f"weight {EXPERTS}"].shape == (4, 2, 24, 32)
    assert state["weight decoder.layers.2.mlp.router.expert_bias"].abs().max() > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_into_every_way_of_sharing_experts(corpus, tmp_path):
    """In bfloat16, so that there are weights, masters and moments."""
    *_, last = run_chain(SLOW.values(), f"--bf16 --global-batch-size 8 --data-path {corpus}", tmp_path)
    kinds = {f"optimizer.{kind}.{EXPERTS}" for kind in ("param", "exp_avg", "exp_avg_sq")}
    assert kinds <= state_at_end(last).keys()


@pytest.mark.slow
def test_the_model_is_the_same_for_use(corpus, tmp_path):
    """In one process, from files of ranks that had a part of each expert."""
    flags = f"--data-path {corpus} --eval-iters 0 --train-iters 1 --save {tmp_path} {GROUPED}"
    saved = state_at_end(train_on_ranks(f"{flags} {TP} 2 --sequence-parallel {ETP} 2", 2, base=MODEL))
    check_equal(weights_for_use(tmp_path), {k: v for k, v in saved.items() if k.startswith("weight ")})
