"""Learning rate and weight decay against golden/lr_schedule.json, and the device's own counting."""

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler

GOLDEN = json.loads((Path(__file__).parents[2] / "data/golden/lr_schedule.json").read_text())
COSINE = {
    "init_lr": 0.0,
    "max_lr": 1e-3,
    "min_lr": 1e-5,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 80,
    "lr_decay_style": "cosine",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": 100,
    "wd_incr_style": "constant",
}


def fake_optimizer(on_device: bool) -> SimpleNamespace:
    groups: list[dict[str, Any]] = [{}, {"max_lr": 2e-3, "min_lr": 1e-4, "wd_mult": 0.0}]
    for group in groups:
        group["lr"] = torch.zeros((), dtype=torch.float64) if on_device else 0.0
    return SimpleNamespace(param_groups=groups)


def close(got: Any, expected: float) -> bool:
    return abs(float(got) - expected) <= 1e-14 * abs(expected)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['args']['lr_decay_style']}-{c['increment']}")
def test_schedules_equal_the_golden_ones(case: dict[str, Any], on_device: bool) -> None:
    optimizer = fake_optimizer(on_device)
    scheduler = OptimizerParamScheduler(optimizer, **case["args"])
    for num_steps, *expected in case["rows"]:
        assert scheduler.num_steps == num_steps
        first, second = optimizer.param_groups
        got = [first["lr"], first["weight_decay"], second["lr"], second["weight_decay"]]
        assert all(map(close, got, expected)), (num_steps, got, expected)
        assert close(scheduler.get_lr(second), expected[2])
        assert close(scheduler.get_wd(first), expected[1])
        if on_device:
            scheduler.advance_on_device(torch.tensor(True), case["increment"])
        else:
            scheduler.step(case["increment"])


@pytest.mark.parametrize(
    ("style", "half_way", "end"), [("cosine", 0.5, 0.0), ("minus_sqrt", 1 - 0.5**0.5, 0.0), ("linear", 0.5, 0.0)]
)
def test_annealing_styles_without_golden_data(style: str, half_way: float, end: float) -> None:
    settings = COSINE | {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": style, "min_lr": 0.0}
    scheduler = OptimizerParamScheduler(fake_optimizer(True), **settings)
    for steps, expected in ((60, 1.0), (70, half_way), (80, end), (81, 0.0)):
        scheduler.step(steps - scheduler.num_steps)
        assert scheduler.get_lr({}) == pytest.approx(1e-3 * expected, rel=1e-12, abs=1e-18)


def test_the_decoupled_rate_is_known_without_a_group_that_has_it() -> None:
    rates = []
    for groups in ([{}, {"max_lr": 2e-3, "min_lr": 1e-4}], [{}], [{"max_lr": 2e-3, "min_lr": 1e-4}]):
        scheduler = OptimizerParamScheduler(
            SimpleNamespace(param_groups=groups), **COSINE, decoupled_lr=2e-3, decoupled_min_lr=1e-4
        )
        scheduler.step(45)
        assert scheduler.decoupled_learning_rate is not None
        rates.append((float(scheduler.learning_rate), float(scheduler.decoupled_learning_rate)))
        own = [group for group in groups if "max_lr" in group]
        assert all(group["lr"] == rates[-1][1] for group in own)
    assert len(set(rates)) == 1 and rates[0][1] > rates[0][0]
    assert OptimizerParamScheduler(fake_optimizer(False), **COSINE).decoupled_learning_rate is None


def test_weight_decay_grows_along_a_cosine() -> None:
    settings = COSINE | {"start_wd": 0.0, "end_wd": 0.4, "wd_incr_style": "cosine"}
    scheduler = OptimizerParamScheduler(fake_optimizer(True), **settings)
    for steps, expected in ((0, 0.0), (25, 0.4 * 0.5 * (1 - 0.5**0.5)), (50, 0.2), (100, 0.4), (130, 0.4)):
        scheduler.step(steps - scheduler.num_steps)
        assert scheduler.get_wd() == pytest.approx(expected, rel=1e-12, abs=1e-16)


def test_a_step_that_was_not_applied_does_not_count() -> None:
    optimizer = fake_optimizer(True)
    scheduler = OptimizerParamScheduler(optimizer, **COSINE)
    before = optimizer.param_groups[0]["lr"]
    for applied in (True, False, True, False):
        scheduler.advance_on_device(torch.tensor(applied), 8)
    assert scheduler.num_steps == 16
    assert optimizer.param_groups[0]["lr"] is before  # in place: a fused step reads this very tensor


def test_state_continues_the_schedule(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = OptimizerParamScheduler(fake_optimizer(True), **COSINE)
    scheduler.step(42)
    state = json.loads(json.dumps(scheduler.state_dict()))
    assert set(state) == (set(COSINE) - {"init_lr"}) | {"num_steps"}
    again = OptimizerParamScheduler(fake_optimizer(False), **COSINE)
    again.load_state_dict(state)
    assert again.get_lr({}) == scheduler.get_lr({})
    assert not caplog.records


@pytest.mark.parametrize(
    ("override", "use_checkpoint", "kept"), [(True, False, 90), (False, True, 80), (True, True, 90)]
)
def test_another_schedule_than_the_checkpoints_is_chosen_aloud(
    override: bool, use_checkpoint: bool, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = OptimizerParamScheduler(fake_optimizer(True), **COSINE).state_dict()
    other = OptimizerParamScheduler(
        fake_optimizer(True),
        **(COSINE | {"lr_decay_steps": 90}),
        override_opt_param_scheduler=override,
        use_checkpoint_opt_param_scheduler=use_checkpoint,
    )
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(state)
    assert other.lr_decay_steps == kept
    assert "lr_decay_steps" in caplog.text


def test_the_checkpoints_style_needs_settings_that_are_not_in_a_checkpoint() -> None:
    """The length of the annealing of WSD is not saved, as in Megatron-LM."""
    annealed = COSINE | {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": "linear"}
    state = OptimizerParamScheduler(fake_optimizer(True), **annealed).state_dict()
    other = OptimizerParamScheduler(fake_optimizer(True), **COSINE)
    with pytest.raises(UserError, match="WSD needs wsd_decay_steps: --lr-wsd-decay-iters"):
        other.load_state_dict(state)


def test_another_schedule_than_the_checkpoints_is_refused_without_a_choice() -> None:
    state = OptimizerParamScheduler(fake_optimizer(True), **COSINE).state_dict()
    other = OptimizerParamScheduler(
        fake_optimizer(True), **(COSINE | {"max_lr": 2e-3}), use_checkpoint_opt_param_scheduler=False
    )
    with pytest.raises(
        UserError, match=r"max_lr is 0\.002 in this run and 0\.001 in the checkpoint: .*--override-opt-par"
    ):
        other.load_state_dict(state)


def test_all_that_differs_is_refused_at_once_as_its_reader_calls_it() -> None:
    state = OptimizerParamScheduler(fake_optimizer(True), **COSINE).state_dict()
    longer = COSINE | {"max_lr": 2e-3, "lr_decay_steps": 90, "wd_incr_steps": 110}
    other = OptimizerParamScheduler(fake_optimizer(True), **longer, use_checkpoint_opt_param_scheduler=False)
    with pytest.raises(UserError) as caught:
        other.load_state_dict(state, spelling=str.upper)
    said = str(caught.value).split(": give the same")[0].split("; ")
    assert said == [
        "MAX_LR is 0.002 in this run and 0.001 in the checkpoint",
        "LR_DECAY_STEPS is 90 in this run and 80 in the checkpoint",
    ], "weight decay that does not grow has no length"
    growing = OptimizerParamScheduler(
        fake_optimizer(True), **(COSINE | {"end_wd": 0.2, "wd_incr_style": "linear", "wd_incr_steps": 110})
    )
    notes: list[str] = []
    growing.load_state_dict(state, log=notes.append)
    assert any("wd_incr_steps is the checkpoint's 100, not 110" in note for note in notes)


def test_impossible_schedules_are_named_all_at_once() -> None:
    wrong = COSINE | {"min_lr": 1.0, "lr_warmup_steps": 80, "lr_decay_style": "WSD", "end_wd": 0.2}
    with pytest.raises(UserError) as caught:
        OptimizerParamScheduler(fake_optimizer(True), **wrong)
    for part in ("min_lr 1.0", "warm-up (80 samples)", "needs wsd_decay_steps", "wd_incr_style linear or cosine"):
        assert part in str(caught.value)


def test_a_logarithmic_warmup_reaches_the_rate_one_update_early() -> None:
    """DeepSpeed's WarmupLR: log(1 + i) / log(N) in update i of N, which is 1 at i = N - 1."""
    scheduler = OptimizerParamScheduler(fake_optimizer(False), **COSINE | {"init_lr": 1e-4}, lr_warmup_log_steps=5.0)
    for update in range(6):  # of two samples each
        share = min(1.0, math.log(1 + update) / math.log(5))
        assert scheduler.get_lr({}) == pytest.approx(1e-4 + share * 9e-4, rel=1e-12)
        scheduler.step(2)
