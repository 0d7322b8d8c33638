"""Biases of experts in a run: moved after each global batch, kept in checkpoints, the same under any layout."""

from pathlib import Path

import pytest
import torch
from support.runs import Outcome, differences, train, train_on_ranks

FLAGS = (
    "--mock-data --eval-iters 0 --num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.125 --moe-grouped-gemm --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --swiglu"
)


def biases(outcome: Outcome) -> list[torch.Tensor]:
    return [value for name, value in sorted(outcome.weights.items()) if name.endswith("router.expert_bias")]


def test_a_run_resumes_with_them_under_another_layout(tmp_path: Path) -> None:
    straight = train(f"{FLAGS} --fp64 --train-iters 4 --save {tmp_path} --save-interval 2")
    (expected, other) = biases(straight)
    assert expected.dtype is torch.float32 and expected.unique().numel() > 1 and not torch.equal(expected, other)
    assert torch.equal(expected / 0.125, (expected / 0.125).round()) and expected.abs().max() <= 0.5
    layout = "--expert-model-parallel-size 2 --use-distributed-optimizer"
    for rank in train_on_ranks(f"{FLAGS} --fp64 --train-iters 4 --load {tmp_path} --ckpt-step 2 {layout}", 2):
        assert len(rank.steps) in (0, 2)
        for found, wanted in zip(biases(rank), (expected, other), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.slow
def test_a_half_precision_run_keeps_them_in_float32(tmp_path: Path) -> None:
    flags = f"{FLAGS} --bf16 --moe-router-dtype fp32 --train-iters 4"
    straight = train(f"{flags} --save {tmp_path} --save-interval 2")
    resumed = train(f"{flags} --load {tmp_path} --ckpt-step 2")
    assert {bias.dtype for bias in biases(straight)} == {torch.float32}
    assert any(bias.any() for bias in biases(straight))
    assert differences(straight.at_end, resumed.at_end) == []
