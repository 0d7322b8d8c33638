"""examples/frozen_reference: losses against simple float64 formulas, and training on two ranks."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks
from support.runs import Outcome, run_script
from support.runs import train as train_gpt

from examples.frozen_reference import train_distilled, train_dpo

FLAGS = (
    "--fp64 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --train-iters 12 --lr 3e-3 --seq-length 16"
)
LAYOUTS = ("--tensor-model-parallel-size 2 --sequence-parallel", "--use-torch-fsdp2 --overlap-param-gather")


def test_dpo_loss_is_that_of_the_formula() -> None:
    policy, reference = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * -9
    losses, margins = train_dpo.dpo_loss(policy, reference, 0.3)
    for pair in range(3):
        chosen, rejected = 2 * pair, 2 * pair + 1
        odds = (policy[chosen].exp() / reference[chosen].exp()) / (policy[rejected].exp() / reference[rejected].exp())
        assert float(losses[pair]) == pytest.approx(-float(torch.log(odds**0.3 / (1 + odds**0.3))), rel=1e-12)
        assert float(margins[pair]) == pytest.approx(0.3 * float(odds.log()), rel=1e-12)


def test_distillation_loss_is_that_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(2)
    student, teacher = torch.randn(2, 2, 3, 7, dtype=torch.float64, generator=generator)
    labels = torch.randint(7, (2, 3), generator=generator)
    found = train_distilled.distillation_losses(student, teacher, labels, 0.3, 2.0)
    for row in range(2):
        for place in range(3):
            p, q = ((logits[row, place] / 2.0).exp() for logits in (teacher, student))
            p, q = p / p.sum(), q / q.sum()
            soft = float((p * (p / q).log()).sum()) * 4.0
            whole = student[row, place].exp()
            hard = -float((whole[labels[row, place]] / whole.sum()).log())
            assert float(found[row, place]) == pytest.approx(0.7 * hard + 0.3 * soft, rel=1e-12)


def run(flags: str, script: str) -> Outcome:
    module: Any = {"dpo": train_dpo, "distilled": train_distilled}[script]
    ranks = {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())} if dist.is_initialized() else {}
    defaults = {"args_defaults": module.DEFAULTS} if script == "dpo" else {}
    with mock.patch.dict(os.environ, ranks):  # as torchrun says it
        return run_script(flags, module.PROVIDERS, extra_args_provider=module.add_flags, **defaults)


def run_all(flags: list[str], script: str) -> list[Outcome]:
    return [run(each, script) for each in flags]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    train_gpt(f"{FLAGS} --train-iters 1 --mock-data --save {root}")
    return root


@pytest.mark.fast("dpo")
@pytest.mark.parametrize("script", ["dpo", "distilled"])
def test_ranks_train_as_one_process(base: Path, tmp_path: Path, script: str) -> None:
    if script == "dpo":
        lines = [{"prompt": f"{n} {n + 1}", "chosen": f"{n + 2} {n + 3}", "rejected": f"{n} {n}"} for n in range(8)]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        own = f"--pairs {tmp_path / 'pairs.jsonl'} --pretrained-checkpoint {base}"
    else:
        own = f"--mock-data --teacher {base} --num-layers 1 --distillation-share 0.8"
    alone = run(f"{FLAGS} {own}", script)
    for found in run_on_ranks(run_all, 2, [f"{FLAGS} {own} {layout}" for layout in LAYOUTS], script)[0]:
        assert found.losses == pytest.approx(alone.losses, rel=1e-10)
    assert sum(alone.losses[-3:]) < 0.97 * sum(alone.losses[:3])
    if script == "dpo":
        assert alone.losses[0] == pytest.approx(0.6931471805599453, rel=1e-9)  # the model is its reference
