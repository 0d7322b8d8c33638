"""A rank that fails ends the run: all processes end soon, with an error, and one message says which rank, and why."""

import fcntl
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import full_gpu
from support.launch import Program, launch
from support.runs import GPT

from megatron.core.communication.collectives import PlannedGroup, all_reduce
from megatron.core.exceptions import UserError
from megatron.core.utils.activity import activity
from megatron.training import pretrain
from megatron.training.checkpoints import Checkpoints
from megatron.training.hooks.hook import Hook
from megatron.training.launch import environment, heartbeat
from megatron.training.launch.heartbeat import Heartbeat, Progress, kind_of
from megatron.training.launch.watch import COMMUNICATION, ERROR, SIGNAL, USER_ERROR, Limits
from megatron.training.providers import Context, ForwardStep, Providers

RANKS = 4


def fail(kind: str) -> None:
    """What goes wrong on one rank."""
    if kind == "raise":
        raise ValueError("a fault")
    if kind in ("kill", "stop", "leave"):
        time.sleep(1.0)  # the others come to wait
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    if kind == "exit":
        sys.exit(0)
    if kind == "leave":
        os._exit(0)
    time.sleep(600)


class FaultAtExit(Hook):
    """Fails when training has ended."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail = fail

    def on_exit(self, iteration: int) -> None:
        """Fails."""
        self.fail()


def pretrain_with_fault(kind: str, phase: str, rank: int) -> None:
    """Trains; one rank has a fault in one phase."""

    def fails_in(here: str) -> None:
        if here == phase and int(os.environ["RANK"]) == rank:
            fail(kind)

    def build_model(*args: Any) -> Any:
        fails_in("start")
        return GPT.build_model(*args)

    def build_datasets(*args: Any) -> Any:
        fails_in("building datasets")
        return GPT.build_datasets(*args)

    def build_forward_step(context: Context) -> ForwardStep:
        forward_step = GPT.build_forward_step(context)

        def step(data: Any, model: Any) -> Any:
            if not model.training:
                fails_in("evaluation")
            elif data.iteration == 1:
                fails_in("training")
            return forward_step(data, model)

        return step

    contents = Checkpoints._contents

    def contents_of(self: Checkpoints, *args: Any) -> Any:
        fails_in("saving")
        return contents(self, *args)

    quick = partial(Limits, silence=1.0, left=1.0, communication=20.0, report=20.0)
    hooks = [FaultAtExit(lambda: fails_in("exit"))]
    with (
        mock.patch.object(environment, "Limits", quick),
        mock.patch.object(heartbeat, "_HEAD_START", 0.1),
        mock.patch.object(Checkpoints, "_contents", contents_of),
    ):
        pretrain(Providers(build_model, build_datasets, build_forward_step, build_hooks=lambda context: hooks))


LAYOUTS = {
    "dp": "",
    "tp": "--tensor-model-parallel-size 2",
    "pp": "--pipeline-model-parallel-size 2",
}
PHASES = ("start", "building datasets", "training", "evaluation", "saving", "exit")
TOLD = {
    "raise": "failed in {}: ValueError: a fault",
    "kill": "ended in {}, without a word",
    "leave": "ended in {}, without a word",
    "stop": "was stopped by a signal (SIGSTOP or SIGTSTP) in {}",
    "exit": "failed in {}: the script called exit",
    "sleep": "has made no progress for {seconds} s in {}",
}


Fault = tuple[str, str, int, str]
"""Kind, phase, rank, and the name of the layout."""


def start(folder: Path, corpus: str, fault: Fault) -> Program:
    kind, phase, rank, layout = fault
    flags = (
        f"--data-path {corpus} --train-iters 2 --eval-interval 2 --eval-iters 1 --save {folder / 'c'} --save-interval 2"
    )
    flags += f" {LAYOUTS[layout]} --hang-timeout-seconds {5 if kind == 'sleep' else 300}"
    return launch(flags, RANKS, folder, partial(pretrain_with_fault, kind, phase, rank))


def check(program: Program, fault: Fault) -> None:
    kind, phase, rank, _ = fault
    codes = program.exit_codes()
    outputs = [program.output(number) for number in range(RANKS)]
    everything = "\n".join(outputs)
    expected = {"kill": -signal.SIGKILL, "stop": -signal.SIGKILL, "leave": 0}.get(kind, 1)
    assert codes == [expected if number == rank else 1 for number in range(RANKS)], everything
    (message,) = [line for line in everything.splitlines() if line.startswith("the run ends:")]
    assert f"rank {rank} of {RANKS} " in message, everything
    assert TOLD[kind].split("{")[0] in message and f" in {phase}" in message, everything
    others = [number for number in range(RANKS) if number != rank]
    assert not any(f"rank {number} of {RANKS} failed" in everything for number in others)
    assert "Traceback" not in "".join(outputs[number] for number in others), everything
    late = phase in ("training", "saving", "evaluation")
    if (late and kind not in ("raise", "exit")) or (kind == "sleep" and phase != "exit"):
        assert f"missed by rank {rank}" in everything or "missed by ranks" in everything, everything


ONE_OF_EACH_PHASE: list[Fault] = [
    ("kill", "training", 3, "pp"),
    ("leave", "exit", 2, "dp"),
    ("stop", "building datasets", 1, "dp"),
    ("stop", "saving", 0, "dp"),
    ("raise", "evaluation", 1, "tp"),
    ("sleep", "start", 2, "tp"),  # last, because its ranks wait for five seconds, while those of the others end
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Iterator[dict[Fault, Program]]:
    """Programs whose ranks wait for seconds. They wait at the same time as each other and the rest."""
    slow = [fault for fault in ONE_OF_EACH_PHASE if fault[0] in ("sleep", "stop")]
    programs = {fault: start(tmp_path_factory.mktemp("fault"), corpus, fault) for fault in slow}
    yield programs
    for program in programs.values():
        program.exit_codes(seconds=0.0)


@pytest.mark.parametrize("fault", ONE_OF_EACH_PHASE, ids=lambda fault: f"{fault[0]}-{fault[1]}")
def test_one_fault_of_each_phase(tmp_path: Path, corpus: str, programs: dict[Fault, Program], fault: Fault) -> None:
    check(programs.get(fault) or start(tmp_path, corpus, fault), fault)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", [*TOLD])
def test_every_fault(tmp_path: Path, corpus: str, kind: str, phase: str, rank: int, layout: str) -> None:
    fault = (kind, phase, rank, layout)
    check(start(tmp_path, corpus, fault), fault)


def raised(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        function()
    return caught.value


def chained() -> None:
    try:
        all_reduce(torch.ones(1), PlannedGroup((0, 1), 0))
    except AssertionError as error:
        raise RuntimeError("another rank is gone") from error


def test_kinds_of_failures() -> None:
    assert kind_of(UserError("--load")) == USER_ERROR
    assert kind_of(SystemExit(143)) == SIGNAL
    assert [kind_of(SystemExit(code)) for code in (0, 1, None)] == [ERROR] * 3
    assert kind_of(raised(lambda: fail("raise"))) == ERROR
    assert kind_of(raised(lambda: dist.TCPStore("127.0.0.1", 1, timeout=timedelta(milliseconds=1)))) == COMMUNICATION
    assert kind_of(raised(chained)) == COMMUNICATION  # also an error that follows from one
    assert kind_of(raised(lambda: torch.ones(2) @ torch.ones(3))) == ERROR
    assert kind_of(dist.DistBackendError("NCCL error: Last error: Cuda failure 1 'invalid argument'")) == COMMUNICATION
    assert kind_of(dist.DistBackendError(full_gpu.NCCL)) == ERROR  # this rank is the cause


def alone() -> Heartbeat:
    return Heartbeat(dist.HashStore(), 0, 1, "127.0.0.1", Progress())


def exit_code_of_child(function: Callable[[], object]) -> int:
    """Returns 7 if the function returns in a forked process."""
    child = os.fork()
    if child == 0:
        function()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_does_not_wait_for_the_other_ranks() -> None:
    heartbeat = alone()
    assert exit_code_of_child(heartbeat.finish) == 7
    heartbeat.finish()


def test_a_new_run_counts_from_the_start() -> None:
    activity.begin("all_reduce", "1", lambda: (0, 1))
    activity.waiting(activity.begin("all_reduce", "1", lambda: (0, 1))).__enter__()
    heartbeat = alone()
    assert not activity.channels and not activity.waits
    heartbeat.finish()


def heartbeat_among_many_files() -> None:
    connect = socket.create_connection

    def connect_late(*args: Any, **kwargs: Any) -> socket.socket:
        with connect(*args, **kwargs) as early:
            return socket.socket(fileno=fcntl.fcntl(early, fcntl.F_DUPFD_CLOEXEC, 1500))

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    with mock.patch("socket.create_connection", connect_late):
        heartbeat = alone()
    time.sleep(0.2)
    heartbeat.finish()


def test_a_process_may_have_many_open_files() -> None:
    assert exit_code_of_child(heartbeat_among_many_files) == 7


def test_an_error_is_a_consequence_only_if_another_rank_has_failed() -> None:
    heartbeat = alone()
    heartbeat._kind = COMMUNICATION
    for rank, consequence in ((1, True), (0, False), (None, False)):
        heartbeat.cause = {"rank": rank}
        assert heartbeat.is_consequence() == consequence
    heartbeat.cause, heartbeat._kind = None, None
    heartbeat.finish()


def test_each_step_is_told_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed rank has no last word: the others know the step in which it was."""
    monkeypatch.setattr(heartbeat, "_RANKS_PER_SECOND", 1e9)
    progress = Progress()
    beats = Heartbeat(dist.HashStore(), 0, 1, "127.0.0.1", progress, Limits(silence=300.0, unreachable=600.0))
    assert beats._server is not None
    beats._server.interval = beats.interval = 1000.0  # no sign of life but those of the steps
    try:
        for iteration in (5, 6, 7):
            progress.reach(iteration)
            end = time.monotonic() + 60
            while not (known := beats._server.watch.ranks.get(0)) or known.iteration != iteration:
                assert time.monotonic() < end, "the step was not told"
                time.sleep(0.01)
    finally:
        beats.close()


def test_short_steps_are_not_all_told() -> None:
    """The first rank could not read them all."""
    progress, told = Progress(), list[Any]()
    beats = alone()
    try:
        progress.call_on(phase=lambda: None, step=beats._step_began)
        with mock.patch.object(beats, "size", 10**9), mock.patch.object(beats, "_send", told.append):
            beats._step_sent = time.monotonic()
            progress.reach(1)
            assert told == []
    finally:
        beats.close()
