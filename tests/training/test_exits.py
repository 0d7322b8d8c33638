"""Exits of whole runs: by interval, by time, by a signal, by the death of a rank."""

import re
import signal
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.launch import launch
from support.runs import GPT, train, train_on_ranks

from megatron.core.exceptions import UserError
from megatron.training import pretrain
from megatron.training.hooks.exit import ExitReason
from megatron.training.launch import errors
from megatron.training.providers import Context, ForwardStep, Providers

ENDLESS = "--train-iters 20000 --eval-iters 0 --log-interval 1"


def saved_iteration(folder) -> int:
    """Returns the iteration of the newest checkpoint, which must be complete: a run resumes from it."""
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert (folder / f"iter_{iteration:07d}" / "manifest.json").exists()
    return iteration


def test_interval_and_duration(tmp_path, corpus, capsys):
    flags = f"--data-path {corpus} --train-iters 10 --eval-iters 0 --save {tmp_path} --load {tmp_path}"
    outcome = train(f"{flags} --exit-interval 4")
    assert outcome.decision.reason is ExitReason.INTERVAL and outcome.decision.exit_code == 0
    assert saved_iteration(tmp_path) == 4
    assert "exiting program at iteration 4\n" in capsys.readouterr().out
    outcome = train(f"{flags} --exit-duration-in-mins 1", seconds_ago=61)
    assert outcome.decision.reason is ExitReason.DURATION and saved_iteration(tmp_path) == 5
    assert "exiting program after 1 minutes (iteration 5)\n" in capsys.readouterr().out
    outcome = train(f"{flags} --exit-duration-in-mins 1")
    assert outcome.decision is None and saved_iteration(tmp_path) == 10
    assert "nothing is left" not in capsys.readouterr().out
    assert train(flags).steps == []
    assert "nothing is left to train: iteration 10 of 10\n" in capsys.readouterr().out


PIPELINE = "--pipeline-model-parallel-size 2"
V_SHAPED = f"{PIPELINE} --pipeline-schedule zb-v --num-layers 4"


@pytest.mark.fast("-1")
@pytest.mark.parametrize(("layout", "logger"), [("", 1), (V_SHAPED, 0)])
def test_a_signal_to_one_rank_in_training(tmp_path, corpus, layout, logger):
    """Both ranks save the same iteration and exit with 0; the next run resumes from there."""
    flags = f"{ENDLESS} --data-path {corpus} {layout}"
    program = launch(f"{flags} --save {tmp_path / 'c'}", 2, tmp_path)
    program.wait_for(logger, " iteration        3/")
    program.signal(1, signal.SIGTERM)
    assert program.exit_codes() == [0, 0]
    iteration = saved_iteration(tmp_path / "c")
    assert f"exiting program after receiving SIGTERM on rank 1 (iteration {iteration})" in program.output(logger)
    resumed = train_on_ranks(f"{flags} --load {tmp_path / 'c'} --exit-interval 1", 2)
    assert all(rank.at_start["state"]["iteration"] == iteration for rank in resumed)
    assert all(rank.at_end["state"]["iteration"] == iteration + 1 for rank in resumed)


def pretrain_and_tell_of_evaluation() -> None:
    def build(context: Context) -> ForwardStep:
        forward_step = GPT.build_forward_step(context)

        def step(data: Any, model: Any) -> Any:
            if not model.training:
                print("evaluating", flush=True)
            return forward_step(data, model)

        return step

    pretrain(Providers(GPT.build_model, GPT.build_datasets, build))


@pytest.mark.slow
def test_a_signal_to_one_rank_in_evaluation(tmp_path, corpus):
    flags = f"--data-path {corpus} --train-iters 6 --eval-interval 3 --eval-iters 20000 --log-interval 1"
    program = launch(f"{flags} --save {tmp_path / 'c'}", 2, tmp_path, pretrain_and_tell_of_evaluation)
    program.wait_for(0, "evaluating")
    program.signal(0, signal.SIGTERM)
    assert program.exit_codes() == [0, 0]
    assert saved_iteration(tmp_path / "c") == 3
    assert re.search(r"evaluation stopped after \d+ of 20000 iterations", program.output(1))
    assert "exiting program after receiving SIGTERM on rank 0 (iteration 3)" in program.output(1)


OFTEN = [(0, ""), (1, PIPELINE)]
SELDOM = [pytest.param(1, "", marks=pytest.mark.slow), pytest.param(0, PIPELINE, marks=pytest.mark.slow)]


@pytest.mark.fast("0-")
@pytest.mark.parametrize(("victim", "layout"), [*OFTEN, *SELDOM])
def test_the_others_end_soon_after_a_killed_rank(tmp_path, corpus, victim, layout):
    program = launch(f"{ENDLESS} --data-path {corpus} --save {tmp_path / 'c'} --save-interval 2 {layout}", 2, tmp_path)
    program.wait_for(1, " iteration        4/")
    program.signal(victim, signal.SIGKILL)
    codes = program.exit_codes()
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] not in (0, None)
    assert saved_iteration(tmp_path / "c") >= 2
    said = rf"the run ends: rank {victim} of 2 ended in (training|saving), after iteration \d+, without a word"
    assert re.search(said, program.output(1 - victim))


def test_plain_python_is_a_run_of_one_process(tmp_path, corpus):
    program = launch(f"{ENDLESS} --data-path {corpus} --save {tmp_path / 'c'}", 0, tmp_path)
    program.wait_for(0, " iteration        3/")
    program.signal(0, signal.SIGTERM)
    assert program.exit_codes() == [0]
    assert saved_iteration(tmp_path / "c") >= 3


def pretrain_after_a_short_wait() -> None:
    """The rank that is alone with its error gives the first one little time."""
    with mock.patch.object(errors, "_HEAD_START_OF_FIRST_RANK", 0.1):
        pretrain(GPT)


def test_a_mistake_exits_with_2(tmp_path, corpus):
    program = launch(f"--data-path {corpus} --train-iters 2 --lr-decay-style WSD", 0, tmp_path)
    assert program.exit_codes() == [2]
    assert "error: --lr-decay-style WSD needs --lr-wsd-decay-iters" in program.output(0)
    (tmp_path / "iter_0000002").mkdir()  # a checkpoint without files, which ranks find when they load
    flags = f"--data-path {corpus} --train-iters 2 --load {tmp_path}"
    program = launch(flags, 2, tmp_path / "other", pretrain_after_a_short_wait)
    assert program.exit_codes() == [2, 2]
    assert "error on rank 1: no complete checkpoint in" in program.output(1)  # nobody ended it


def test_a_folder_that_cannot_be_written_is_called_by_the_flag_that_was_given(tmp_path):
    (tmp_path / "file").touch()
    flags = "--mock-data --train-iters 1 --eval-iters 0"
    with pytest.raises(UserError, match=r"^--save: .*/file/run/metrics.jsonl cannot be written: Not a directory"):
        train(f"{flags} --save {tmp_path}/file/run")
    with pytest.raises(UserError, match=r"^--metrics-path .*/file/m cannot be written: "):
        train(f"{flags} --metrics-path {tmp_path}/file/m")


def pretrain_and_tell_of_the_wait() -> None:
    def wait(seconds: float) -> None:
        print("waiting for the first rank", flush=True)
        time.sleep(600)

    with mock.patch.object(errors, "time", SimpleNamespace(sleep=wait, time=time.time)):
        pretrain(GPT)


def test_a_mistake_that_all_ranks_find_is_said_once(tmp_path, corpus):
    """The test ends the other rank when the first has ended, as torchrun does."""
    (tmp_path / "iter_0000002").mkdir()
    flags = f"--data-path {corpus} --train-iters 2 --load {tmp_path}"
    program = launch(flags, 2, tmp_path / "run", pretrain_and_tell_of_the_wait)
    program.wait_for(0, "error on rank 0: no complete checkpoint in")
    program.wait_for(1, "waiting for the first rank")
    program.processes[0].join()
    program.signal(1, signal.SIGTERM)
    assert program.exit_codes() == [2, -signal.SIGTERM]
    assert "error" not in program.output(1) and "SIGTERM" not in program.output(1)
