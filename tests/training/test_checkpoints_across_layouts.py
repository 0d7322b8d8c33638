"""Checkpoints of whole runs, saved in one layout and loaded in another: bit-equal, and the run continues unchanged."""

from pathlib import Path

import pytest
import torch
from support.runs import (
    GPT,
    TINY,
    Outcome,
    logger_of,
    state_at_end,
    state_at_start,
    stream,
    train,
    train_all_on_ranks,
    train_on_ranks,
)
from torch import Tensor

from megatron.core.parameters import info_of
from megatron.training.trained_model import load_trained_model

BASE = f"{TINY} --num-layers 4 --num-attention-heads 4"

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
SHARDED = "--use-distributed-optimizer"
ZERO_3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
TP2_PP2_CP2 = f"{TP} 2 --sequence-parallel {PP} 2 {CP} 2 {SHARDED}"
FACTS = ("state", "scheduler", "optimizer")
"""State that is the same on all ranks: counts, position in the schedule, updates made."""


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    differing = [name for name in expected if found[name].dtype != expected[name].dtype]
    differing += [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differing, differing


def check_continues(loaded: list[Outcome], saved: list[Outcome]) -> None:
    """Weights, masters, moments and counts are those that were saved."""
    check_equal(state_at_start(loaded), state_at_end(saved))
    for rank in loaded:
        assert all(rank.at_start[fact] == saved[0].at_end[fact] for fact in FACTS)


@pytest.mark.slow
def test_from_all_dimensions_at_once_into_any_other_layout_and_back(corpus, tmp_path):
    """In bfloat16, so that there are weights, masters and moments."""
    flags = f"--bf16 --data-path {corpus} --eval-iters 0 --save {tmp_path} --load {tmp_path} --train-iters 10"
    flags += " --exit-interval"
    saved = train_on_ranks(f"{flags} 2 {TP2_PP2_CP2}", 8, base=BASE)
    kinds = {name.split(".")[1] for name in state_at_end(saved) if name.startswith("optimizer.")}
    assert kinds == {"param", "exp_avg", "exp_avg_sq"}
    iteration = 2
    for world_size, layout in ((1, ""), (4, f"{TP} 4"), (4, f"{PP} 4"), (4, ZERO_3), (8, TP2_PP2_CP2)):
        iteration += 1
        loaded = train_on_ranks(f"{flags} {iteration} {layout}", world_size, base=BASE)
        check_continues(loaded, saved)
        assert loaded[0].at_end["state"]["iteration"] == iteration
        saved = loaded


LAYOUTS_OF_TWO = {
    "tensor and sequence": f"{TP} 2 --sequence-parallel",
    "interleaved": f"{PP} 2 --num-layers-per-virtual-pipeline-stage 1",
    "sharded": ZERO_3,
    "v-shaped": f"{PP} 2 --pipeline-schedule zb-v",
    "context, sharded state": f"{CP} 2 {SHARDED}",
}


def test_a_run_that_changes_its_layout_goes_on_as_it_was(corpus, tmp_path):
    """One iteration in each layout, the last in one process: losses equal those of a run in one process."""
    flags = f"--fp64 --data-path {corpus} --eval-iters 0 --train-iters 10 --exit-interval"
    layouts = [
        layout for name, layout in LAYOUTS_OF_TWO.items() if name != "interleaved"
    ]  # v-shaped has two chunks too
    iterations = len(layouts) + 1
    straight = train(f"{flags} {iterations}", base=BASE)
    folders = f"--save {tmp_path} --load {tmp_path}"
    losses, samples, saved = [], [], None
    for iteration, layout in enumerate([*layouts, ""], start=1):
        ranks = train_on_ranks(f"{flags} {iteration} {folders} {layout}", 2 if layout else 1, base=BASE)
        if saved is not None:
            check_continues(ranks, saved)
        losses += logger_of(ranks).losses
        samples += stream(ranks)
        saved = ranks
        check_equal(
            weights_for_use(tmp_path), {k: v for k, v in state_at_end(ranks).items() if k.startswith("weight ")}
        )
    assert losses == pytest.approx(straight.losses, rel=1e-11) and len(losses) == iterations
    assert samples == stream([straight])


def weights_for_use(folder: Path) -> dict[str, Tensor]:
    """Loads the newest model of a run in one process, as generation does."""
    trained = load_trained_model(GPT.build_model, folder, log=lambda sentence: None)
    return {
        f"weight {info_of(p).name}": p.detach().view(-1)[: info_of(p).box.numel].view(info_of(p).global_shape)
        for p in trained.model.parameters()
    }


@pytest.mark.slow
def test_evaluation_alone_in_any_layout(corpus, tmp_path):
    """--skip-train reads weights and no optimizer state, and prints the losses that the training run printed."""
    flags = f"--fp64 --data-path {corpus} --train-iters 1 --eval-iters 2 --save {tmp_path} --load {tmp_path}"
    trained = train(flags, base=BASE)
    runs = [f"{flags} --skip-train {layout}" for layout in LAYOUTS_OF_TWO.values()]
    by_rank = train_all_on_ranks(runs, 2, base=BASE)
    for number, name in enumerate(LAYOUTS_OF_TWO):
        found = logger_of([outcomes[number] for outcomes in by_rank])
        assert found.steps == [] and [record.split for record in found.validations] == ["validation", "test"], name
        for record, expected in zip(found.validations, trained.validations, strict=True):
            assert record.losses == pytest.approx(expected.losses, abs=1e-11), name


def test_a_key_that_another_layout_lacks_is_an_error(corpus, tmp_path):
    """All ranks raise the same error; with the flag that leaves the state out, the run continues."""
    flags = f"--data-path {corpus} --eval-iters 0 --save {tmp_path} --load {tmp_path} --train-iters 2"
    train(f"{flags} --exit-interval 1 --no-save-optim", base=BASE)
    with pytest.raises(AssertionError, match=r"(?s)rank 0: .*was saved without optimizer state"):
        train_on_ranks(f"{flags} {PP} 2", 2, base=BASE)
    ranks = train_on_ranks(f"{flags} {PP} 2 --no-load-optim", 2, base=BASE)
    assert ranks[0].at_end["state"]["iteration"] == 2
    assert Path(tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
