"""Rules for batches and schedules: each problem names flags, values and what works."""

import pytest
from support.command_lines import problems_of, without

RULES = [
    (
        "--global-batch-size 5",
        "--global-batch-size 5 is not divisible by --micro-batch-size 2 x 1 data parallel ranks; use 4 or 6",
    ),
    ("--train-iters 5 --train-samples 5", "--train-iters 5 and --train-samples 5 say how long to train in two ways"),
    ("--min-lr 1", "--min-lr 1.0 is larger than --lr 0.001"),
    ("--lr-warmup-init 1", "--lr-warmup-init 1.0 is larger than --lr 0.001"),
    ("--lr-warmup-samples 10", "--lr-warmup-samples 10 does not go with --train-iters; give --lr-warmup-iters"),
    ("--lr-decay-samples 10", "--lr-decay-samples 10 does not go with --train-iters; give --lr-decay-iters"),
    ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    (
        "--train-samples 100 --lr-decay-style WSD --lr-wsd-decay-iters 4",
        "--lr-wsd-decay-iters 4 does not go with --train-samples; give --lr-wsd-decay-samples",
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 11",
        "--lr-wsd-decay-iters 11 is longer than the whole schedule, --train-iters 10",
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-decay-iters 8",
        "--lr-wsd-decay-iters 9 is longer than the whole schedule, --lr-decay-iters 8",
    ),
    ("--end-weight-decay 0.5", "--end-weight-decay 0.5 needs --weight-decay-incr-style linear or cosine"),
    (
        "--train-iters 100000000000 --global-batch-size 4",
        "--train-iters 100000000000 x --global-batch-size 4 are 400000000000 samples; at most 100000000000 are",
    ),
    (
        "--rampup-batch-size 2 2 10 --global-batch-size 100000000000",  # as many sizes as no list holds
        "--train-iters 10 x --global-batch-size 100000000000 are 1000000000000 samples; at most 100000000000 are",
    ),
    ("--eval-iters 100000000000", "--eval-iters 100000000000 x --global-batch-size 2 are 200000000000 samples"),
]


@pytest.mark.parametrize(("flags", "message"), RULES, ids=[flags for flags, _ in RULES])
def test_a_rule_names_flags_values_and_what_works(flags: str, message: str) -> None:
    assert any(problem.startswith(message) for problem in problems_of(flags)), problems_of(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--rampup-batch-size 3 1 100 --global-batch-size 16",
            "the batch size 3 of --rampup-batch-size is not divisible",
        ),
        ("--lr-warmup-iters 1", "--lr-warmup-iters 1 does not go with --train-samples; give --lr-warmup-samples"),
    ],
)
def test_rules_of_runs_by_samples(flags: str, message: str) -> None:
    problems = problems_of(f"--train-samples 1000 {flags}", base=without("--train-iters"))
    assert any(message in problem for problem in problems), problems
