"""--exact-data-parallel-sums: losses, norms and weights do not depend on data parallelism in any bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.runs import TINY, Outcome, logger_of, state_at_end, train, train_all_on_ranks
from torch import Tensor

BASE = TINY.replace("--global-batch-size 4", "--global-batch-size 24")
RUN = "--train-iters 4 --lr-warmup-iters 1 --deterministic-mode"
EXACT = f"{RUN} --exact-data-parallel-sums --untie-embeddings-and-output-weights"
SHARDED = "--use-distributed-optimizer"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
STRATEGIES = {
    "ZeRO-0": "",
    "ZeRO-0 overlapped": "--overlap-grad-reduce",
    "ZeRO-1": SHARDED,
    "ZeRO-1 overlapped": f"{SHARDED} --overlap-grad-reduce --overlap-param-gather",
    "ZeRO-2": f"{FSDP} optim_grads --overlap-grad-reduce",
    "ZeRO-3": f"{FSDP} optim_grads_params --overlap-grad-reduce",
}


def bits(ranks: Sequence[Outcome]) -> tuple[list[float], list[float | None], dict[str, Tensor]]:
    """Losses and norms of all steps, and the state at the end."""
    seen = logger_of(ranks)
    return seen.losses, [step.grad_norm for step in seen.steps], state_at_end(ranks)


def differ(found: tuple[Any, ...], expected: tuple[Any, ...]) -> list[str]:
    """What is not equal in every bit."""
    names = [name for name, same in zip(("losses", "norms"), map(list.__eq__, found, expected[:2]), strict=False) if not same]
    assert found[2].keys() == expected[2].keys()
    return names + [name for name in found[2] if not torch.equal(found[2][name], expected[2][name])]


def test_all(corpus):
    for precision in ("--bf16",):
        flags = f"{EXACT} --data-path {corpus} {precision}"
        alone = bits([train(flags, base=BASE)])
        print(alone[0], alone[1])
        for world in (2,):
            runs = train_all_on_ranks([f"{flags} {each}" for each in STRATEGIES.values()], world, base=BASE)
            for number, name in enumerate(STRATEGIES):
                found = bits([outcomes[number] for outcomes in runs])
                print(precision, world, name, differ(found, alone))
    flags = f"{RUN} --untie-embeddings-and-output-weights --data-path {corpus} --bf16"
    alone = bits([train(flags, base=BASE)])
    runs = train_all_on_ranks([f"{flags} {each}" for each in STRATEGIES.values()], 2, base=BASE)
    for number, name in enumerate(STRATEGIES):
        print("plain", name, differ(bits([outcomes[number] for outcomes in runs]), alone)[:4])
