"""Runs with CUDA graphs give the bits of runs without: losses, gradient norms, weights, optimizer state."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from support.gpu_runs import DETERMINISTIC, GRAPH_RUNS, GRAPH_STEPS, GRAPHS, RUNS
from support.runs import Outcome, differences, train

from megatron.core.utils.graph_capture import CudaGraphRecorder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-workers 0"


def trained(name: str, *flags: str) -> Outcome:
    words = [*GRAPH_RUNS[name], *flags]
    assert words in RUNS.values(), "a command line that no test on a CPU checks"
    return train(DATA, base=" ".join(words))


@functools.cache
def trained_eagerly(name: str, number: int, *flags: str) -> Outcome:
    """The outcome of a run without graphs, which several tests share. `number` tells apart runs with equal flags."""
    return trained(name, *flags)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each capture."""
    found: list[int] = []
    capture = CudaGraphRecorder.capture
    monkeypatch.setattr(CudaGraphRecorder, "capture", lambda self, run: found.append(1) or capture(self, run))
    return found


@pytest.mark.parametrize("name", GRAPH_RUNS)
def test_graphs_give_the_bits_of_the_eager_run(name: str, captures: list[int]) -> None:
    eager = trained_eagerly(name, 0, DETERMINISTIC)
    graphed = trained(name, DETERMINISTIC, *GRAPHS)
    assert len(captures) == 1, "nothing was captured, so nothing was compared"
    assert_equal(name, graphed, eager)


def assert_equal(name: str, graphed: Outcome, eager: Outcome) -> None:
    assert len(eager.steps) == GRAPH_STEPS and eager.losses[0] != eager.losses[-1]
    print(name, [a - b for a, b in zip(eager.losses, graphed.losses, strict=True)])
    assert graphed.losses == eager.losses
    assert [step.grad_norm for step in graphed.steps] == [step.grad_norm for step in eager.steps]
    assert not differences(graphed.at_end, eager.at_end)


@pytest.mark.parametrize("name", ["gpt", "gpt dropout", "llama"])
def test_the_fastest_kernels_in_graphs_differ_no_more_than_from_run_to_run(name: str, captures: list[int]) -> None:
    eager = [trained_eagerly(name, number).losses for number in range(3)]
    graphed = trained(name, *GRAPHS).losses
    assert len(captures) == 1
    spread = max(abs(x - y) for a, b in itertools.combinations(eager, 2) for x, y in zip(a, b, strict=True))
    apart = min(max(abs(x - y) for x, y in zip(graphed, one, strict=True)) for one in eager)
    print(f"{name}: eager runs differ by up to {spread:.2e}, graphs by {apart:.2e}")
    assert apart <= 2 * spread


def waits() -> None:
    torch.ones((), device="cuda").item()


def waits_and_draws() -> None:
    torch.rand(8, device="cuda")
    torch.cuda.synchronize()


def forks() -> None:
    """Starts work on another stream, and does not wait for it."""
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.ones(8, device="cuda").add_(1)


def raises() -> None:
    torch.rand(8, device="cuda")
    raise RuntimeError("an error of the function during the capture")


@pytest.mark.parametrize("function", [waits, waits_and_draws, forks, raises])
def test_a_capture_that_fails_leaves_nothing_behind(function: Callable[[], None]) -> None:
    """Streams, memory, random numbers, graphs from before, and later captures."""
    recorder = CudaGraphRecorder(torch.device("cuda", torch.cuda.current_device()))
    number = torch.ones(8, device="cuda").add_(1).mul_(torch.zeros(8, device="cuda"))  # loads the kernels
    before = recorder.capture(lambda: number.add_(1))
    torch.manual_seed(7)
    expected = [torch.rand(8, device="cuda") for _ in range(2)]
    stream = torch.cuda.current_stream()
    torch.manual_seed(7)
    with pytest.raises(RuntimeError, match="captur"):
        recorder.capture(function)
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    assert torch.equal(torch.rand(8, device="cuda"), expected[0])
    before.replay()
    after = recorder.capture(lambda: number.mul_(torch.rand(8, device="cuda")))
    after.replay()
    assert torch.equal(number, expected[1])
    torch.cuda.empty_cache()
