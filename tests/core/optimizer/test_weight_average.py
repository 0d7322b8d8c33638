"""--ema-decay: its formula, exact on resume and in every layout; evaluated and exported, with the weights untouched."""

import dataclasses
from pathlib import Path

import pytest
import torch
from support.runs import GPT, Outcome, differences, logger_of, state_at_end, state_at_start, train, train_on_ranks
from torch import Tensor

from megatron.conversion.exporting import export_model
from megatron.core.dist_checkpointing.chunk import model_chunks
from megatron.core.exceptions import UserError
from megatron.training.trained_model import load_trained_model
from tools.entry_scripts import build_model

RUN = "--mock-data --fp64 --ema-decay 0.4"


def averages(state: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "optimizer.ema."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("weight "): value for name, value in state.items() if name.startswith("weight ")}


def test_the_average_follows_the_formula() -> None:
    run = RUN.replace("0.4", "0.22")  # which the second step reaches
    runs = [train(f"{run} --train-iters {steps} --lr-decay-style constant") for steps in (1, 2, 3)]
    expected = weights(state_at_start(runs[:1]))
    for number, run in enumerate(runs, 1):
        decay = min(0.22, (1 + number) / (10 + number))
        now = weights(state_at_end([run]))
        expected = {name: decay * value + (1 - decay) * now[name] for name, value in expected.items()}
    found = averages(state_at_end(runs[-1:]))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-15)


def test_a_resumed_run_has_the_same_average_in_another_layout_too(tmp_path: Path) -> None:
    whole = train(f"{RUN} --train-iters 4 --save {tmp_path} --save-interval 2")
    again = train(f"{RUN} --train-iters 4 --load {tmp_path} --ckpt-step 2")
    assert not [name for name in differences(whole.at_end, again.at_end) if "ema" in name]
    layout = "--tensor-model-parallel-size 2 --use-distributed-optimizer"
    expected = averages(state_at_end([whole]))
    found = averages(state_at_end(train_on_ranks(f"{RUN} --train-iters 4 --load {tmp_path} --ckpt-step 2 {layout}", 2)))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13)


@pytest.mark.slow_cases("optim")
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_an_evaluation_measures_the_average_and_leaves_the_weights_alone(strategy: str) -> None:
    run = f"{RUN} --bf16".replace("--fp64 ", "") + " --train-iters 2"
    layout = f"--data-parallel-sharding-strategy {strategy}"
    alone = train_on_ranks(f"{run} {layout}", 2)
    ranks = train_on_ranks(f"{run} --eval-iters 1 {layout}", 2)
    before, after = state_at_end(alone), state_at_end(ranks)
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = {record.split: record.losses["lm loss"] for record in logger_of(ranks).validations}
    assert [*found] == ["validation", "validation-ema", "test", "test-ema"]
    assert found["validation"] != found["validation-ema"]


def test_the_average_is_what_an_evaluation_of_its_export_measures(tmp_path: Path) -> None:
    llama = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
    run = f"{RUN} --train-iters 3 --eval-iters 1 {llama}"
    first = train(f"{run} --save {tmp_path / 'a'}")
    model = load_trained_model(build_model, tmp_path / "a", average=True).model
    own = averages(state_at_end([first]))
    for chunk in model_chunks(model, lambda info: ()):
        assert torch.equal(chunk.values(), own[chunk.name].flatten()), chunk.name
    export_model(tmp_path / "a", tmp_path / "hf", build_model, average=True)
    hub = train(f"{run} --load-hf {tmp_path / 'hf'} --skip-train")
    assert losses(hub)["validation"] == pytest.approx(losses(first)["validation-ema"], rel=1e-12)
    assert losses(hub)["validation-ema"] == losses(hub)["validation"], "a new average begins with the loaded weights"
    again = train(f"{run} --load {tmp_path / 'a'} --skip-train")
    assert losses(again) == losses(first)


def losses(run: Outcome) -> dict[str, float]:
    return {record.split: record.losses["lm loss"] for record in run.validations}


def test_a_run_may_begin_and_end_to_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = RUN.replace("--ema-decay 0.4", "")
    train(f"{plain} --train-iters 1 --save {tmp_path}")
    begun = train(f"{RUN} --train-iters 1 --load {tmp_path} --save {tmp_path / 'b'} --override-ckpt-iteration 0")
    assert "--ema-decay: the average begins with the loaded weights" in capsys.readouterr().out
    loaded = state_at_start([begun])
    assert all(torch.equal(value, weights(loaded)[name]) for name, value in averages(loaded).items())
    assert not averages(state_at_end([train(f"{plain} --train-iters 1 --load {tmp_path / 'b'}")]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--ema-decay 1.0", "--ema-decay 1.0 must be larger than 0 and less than 1"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 1.0", "leave out --optimizer-cpu-offload"),
        ("--eval-iters 1 --eval-fresh-samples", "leave out --eval-fresh-samples"),
        ("--save saved --no-save-optim", "leave out --no-save-optim"),
        ("--bf16 --fp8-format e4m3 --fp8-param-gather", "keeps in fp8"),
    ],
)
def test_values_that_cannot_work_are_refused(more: str, message: str) -> None:
    run = RUN.replace("--fp64", "") if "bf16" in more else RUN
    with pytest.raises(UserError, match=message):
        train(f"{run} --train-iters 1 {more}")


def test_an_optimizer_of_the_script_keeps_no_average() -> None:
    providers = dataclasses.replace(GPT, build_optimizer=lambda context, model: None)
    with pytest.raises(UserError, match="--ema-decay: the script's own optimizer keeps no average of the weights"):
        train(f"{RUN} --train-iters 1", providers)
