"""Stopping and resuming: bit-equal in the same layout, equal up to rounding in another one."""

import pytest
from support.runs import Outcome, differences, stream, train, train_on_ranks

from megatron.core.exceptions import UserError

PRECISIONS = {
    "bf16": "--bf16",
    "fp32": "",
    "fp16": "--fp16 --initial-loss-scale 1048576 --loss-scale-window 3 --hysteresis 1",
}
MAIN_GRADS = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --megatron-fsdp-main-grads-dtype bf16"
)
FLAGS = "--train-iters 10 --eval-interval 3 --eval-iters 1 --clip-grad 0.5 --lr-warmup-iters 2 --min-lr 1e-3"
TWO_MICRO_BATCHES = "--micro-batch-size 2"


def test_dropout_is_on_by_default(corpus):
    """The comparisons below depend on it."""
    with_it = train(f"--data-path {corpus} --train-iters 1 --eval-iters 0")
    without = train(f"--data-path {corpus} --train-iters 1 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0")
    assert with_it.losses != without.losses


@pytest.mark.fast("bf16")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ten_iterations_are_five_and_five(tmp_path, corpus, precision):
    flags = f"{PRECISIONS[precision]} --data-path {corpus} {FLAGS} {TWO_MICRO_BATCHES}"
    straight = train(flags)
    folders = f"--save {tmp_path} --load {tmp_path}"
    first = train(f"{flags} {folders} --exit-interval 5")
    second = train(f"{flags} {folders}")
    assert first.decision is not None and first.at_end["state"]["iteration"] == 5
    assert differences(second.at_start, first.at_end) == []
    assert differences(second.at_end, straight.at_end) == []
    assert first.losses + second.losses == straight.losses and len(straight.losses) == 10
    assert first.sample_ids + second.sample_ids == straight.sample_ids
    assert losses_of_evaluations(first, second) == losses_of_evaluations(straight)
    if precision == "fp16":
        assert len({step.loss_scale for step in straight.steps}) > 2
        assert any(not step.applied for step in straight.steps)


def test_saves_in_the_background_are_those_of_their_steps(tmp_path, corpus, capsys):
    """Training goes on while a checkpoint is written. What is loaded is the state of the step that began it."""
    flags = f"--data-path {corpus} {FLAGS} {TWO_MICRO_BATCHES}"
    straight = train(flags)
    first = train_on_ranks(f"{flags} --save {tmp_path} --async-save --save-interval 2 --exit-interval 5", 2)
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == [f"iter_{n:07d}" for n in (2, 4, 5)]
    second = train(f"{flags} --save {tmp_path} --load {tmp_path} --async-save --ckpt-step 4 --save-interval 100")
    assert first[0].losses[:4] + second.losses == pytest.approx(straight.losses, rel=1e-5)
    assert "successfully saved checkpoint from iteration      10" in capsys.readouterr().out
    # The counts of validation samples differ: the last evaluation comes after the last save.
    assert differences(train(f"{flags} --load {tmp_path}").at_start, second.at_end) == ["state"]


@pytest.mark.parametrize("flags", ["--use-precision-aware-optimizer --main-grads-dtype bf16", MAIN_GRADS])
def test_gradients_accumulated_in_bfloat16(corpus, flags):
    """Losses of the first steps are those of gradients in float32, up to rounding. The optimizer's state is alike."""
    same = f"--bf16 --data-path {corpus} --train-iters 4 --eval-iters 0 --lr 1e-3"
    wide, narrow = train(same), train(f"{same} {flags}")
    assert narrow.losses == pytest.approx(wide.losses, rel=2e-3) and narrow.losses != wide.losses
    assert narrow.steps[0].grad_norm == pytest.approx(wide.steps[0].grad_norm, rel=1e-2)


def losses_of_evaluations(*outcomes: Outcome) -> list[tuple[int, str, float]]:
    records = [record for outcome in outcomes for record in outcome.validations]
    return [(record.iteration, record.split, record.losses["lm loss"]) for record in records]


@pytest.mark.slow
def test_data_workers_change_nothing(tmp_path, corpus):
    same = f"--data-path {corpus} {FLAGS} {TWO_MICRO_BATCHES}"
    flags = f"{same} --save {tmp_path} --load {tmp_path}"
    straight = train(same)
    first = train(f"{flags} --exit-interval 5 --num-workers 2")
    second = train(f"{flags} --exit-interval 7 --num-workers 0")
    third = train(f"{flags} --num-workers 1")
    assert differences(third.at_end, straight.at_end) == []
    assert first.losses + second.losses + third.losses == straight.losses
    assert first.sample_ids + second.sample_ids + third.sample_ids == straight.sample_ids


def test_train_samples_count_those_of_earlier_batches(tmp_path, corpus, capsys):
    same = f"--data-path {corpus} --eval-iters 0 --lr 1e-3 --micro-batch-size 1 --train-samples 40"
    same += f" --save {tmp_path} --load {tmp_path}"
    first = train(f"{same} --global-batch-size 8 --exit-interval 2")
    assert "end in iteration" not in capsys.readouterr().out
    second = train(f"{same} --global-batch-size 4 --exit-interval 4")
    assert "--train-samples 40 end in iteration 8: the first 2 iterations had 16 of them" in capsys.readouterr().out
    path = tmp_path / "iter_0000004" / "rank_00000.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + b"\0\0\0")
    older = "from that of iteration 2 --train-samples end in iteration 6 instead of 7: add --ckpt-step 2"
    with pytest.raises(UserError, match=older):  # the length is settled before tensors are read
        train(f"{same} --global-batch-size 5")
    path.write_bytes(whole)
    capsys.readouterr()
    third = train(f"{same} --global-batch-size 5")
    assert "--train-samples 40 end in iteration 7: the first 4 iterations had 24 of them" in capsys.readouterr().out
    assert [len(outcome.losses) for outcome in (first, second, third)] == [2, 2, 3]
    assert [number for outcome in (first, second, third) for number in stream([outcome])] == list(range(39))


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("--fp64", 1e-11), pytest.param("", 1e-5, marks=pytest.mark.slow)]
)
def test_other_numbers_of_data_parallel_ranks_between(tmp_path, corpus, precision, tolerance):
    """2 ranks, then 1, then 4: what is loaded is what was saved, samples go on, losses agree to rounding."""
    flags = f"{precision} --data-path {corpus} {FLAGS} --train-iters 6"
    folders = f"--save {tmp_path} --load {tmp_path}"
    straight = train_on_ranks(flags, 2)
    first = train_on_ranks(f"{flags} {folders} --exit-interval 2", 2)
    (second,) = train_on_ranks(f"{flags} {folders} --exit-interval 4", 1)
    third = train_on_ranks(f"{flags} {folders}", 4)
    assert differences(second.at_start, first[0].at_end) == []
    assert all(differences(rank.at_start, second.at_end) == [] for rank in third)
    ids = [stream(first), stream([second]), stream(third)]
    assert [number for part in ids for number in part] == stream(straight) == list(range(24))
    losses = first[0].losses + second.losses + third[0].losses
    assert losses == pytest.approx(straight[0].losses, rel=tolerance)
    assert len(losses) == 6
