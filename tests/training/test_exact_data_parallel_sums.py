"""--exact-data-parallel-sums: losses, norms and weights do not depend on data parallelism in any bit."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.runs import TINY, Outcome, logger_of, state_at_end, train, train_all_on_ranks

from megatron.core.distributed import distributed_data_parallel
from megatron.core.distributed.exact_sums import FixedPoint

BASE = TINY.replace("--global-batch-size 4", "--global-batch-size 8")
OF_3_RANKS = "--global-batch-size 24"
RUN = "--train-iters 3 --lr-warmup-iters 1 --deterministic-mode --untie-embeddings-and-output-weights"
EXACT = "--exact-data-parallel-sums"
PER_TOKEN = "--calculate-per-token-loss --reset-position-ids --reset-attention-mask --eod-mask-loss --balanced-packing"
SHARDED = "--use-distributed-optimizer"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
STRATEGIES = {
    "ZeRO-0": "",
    "ZeRO-0 overlapped": "--overlap-grad-reduce",
    "ZeRO-1": SHARDED,
    "ZeRO-1 overlapped": f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1",
    "ZeRO-2": f"{FSDP} optim_grads --overlap-grad-reduce",
    "ZeRO-3": f"{FSDP} optim_grads_params",
}


def differences(ranks: Sequence[Outcome], alone: Outcome) -> list[str]:
    """Returns what is not equal in every bit: losses, norms, weights, the optimizer's state."""
    seen, end, expected = logger_of(ranks), state_at_end(ranks), state_at_end([alone])
    assert end.keys() == expected.keys() and len(alone.losses) == len(seen.losses) > 0
    found = [name for name in end if not torch.equal(end[name], expected[name])]
    found += ["losses"] if seen.losses != alone.losses else []
    return found + (["norms"] if [s.grad_norm for s in seen.steps] != [s.grad_norm for s in alone.steps] else [])


def check(flags: str, ranks: int, strategies: Sequence[str]) -> None:
    alone = train(flags, base=BASE)
    by_rank = train_all_on_ranks([f"{flags} {STRATEGIES[name]}" for name in strategies], ranks, base=BASE)
    found = {name: differences([runs[n] for runs in by_rank], alone) for n, name in enumerate(strategies)}
    assert found == {name: [] for name in strategies}


def test_two_ranks_give_the_bits_of_one_process(corpus: str) -> None:
    check(f"{RUN} {EXACT} --bf16 --data-path {corpus}", 2, ["ZeRO-1 overlapped", "ZeRO-3"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--bf16", PER_TOKEN])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_any_number_of_ranks_and_any_sharding_give_the_bits_of_one_process(
    corpus: str, ranks: int, precision: str
) -> None:
    check(f"{RUN} {EXACT} {precision} {OF_3_RANKS} --data-path {corpus}", ranks, list(STRATEGIES))


def test_without_the_flag_the_bits_differ(corpus: str) -> None:
    flags = f"{RUN} --bf16 --data-path {corpus}"
    alone, by_rank = train(flags, base=BASE), train_all_on_ranks([flags], 2, base=BASE)
    assert "norms" in differences([runs[0] for runs in by_rank], alone)


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_and_another_sharding(corpus: str, tmp_path: Path) -> None:
    flags = f"{RUN} {EXACT} {OF_3_RANKS} --bf16 --data-path {corpus} --lr-decay-iters 4 --save-interval 1"
    alone = train(f"{flags} --train-iters 4", base=BASE)
    saved = f"{flags} --save {tmp_path / 'run'} --load {tmp_path / 'run'}"
    train_all_on_ranks([f"{saved} --train-iters 1 {STRATEGIES['ZeRO-1']}"], 2, base=BASE)
    train_all_on_ranks([f"{saved} --train-iters 2 {STRATEGIES['ZeRO-3']}"], 4, base=BASE)
    train(f"{saved} --train-iters 3", base=BASE)
    by_rank = train_all_on_ranks([f"{saved} --train-iters 4 {STRATEGIES['ZeRO-2']}"], 3, base=BASE)
    end, expected = state_at_end([runs[0] for runs in by_rank]), state_at_end([alone])
    assert [name for name in expected if not torch.equal(end[name], expected[name])] == []
    assert logger_of([runs[0] for runs in by_rank]).losses == alone.losses[3:]


def test_a_gradient_beyond_the_numbers_skips_the_update(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_data_parallel, "MEANS", FixedPoint(70))  # limits gradients to 2^-20
    flags = f"{RUN} {EXACT} --bf16 --train-iters 2 --nonfinite-action skip --data-path {corpus}"
    assert [step.applied for step in train(flags, base=BASE).steps] == [False, False]
