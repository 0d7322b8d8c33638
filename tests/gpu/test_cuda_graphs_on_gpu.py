"""Runs with CUDA graphs give the bits of runs without: losses, gradient norms, weights, optimizer state."""

import functools
import itertools

import pytest
import torch
from support.gpu_runs import DETERMINISTIC, GRAPH_RUNS, GRAPH_STEPS, GRAPHS, PART_RUNS, PARTS, RUNS
from support.runs import Outcome, differences, train

from megatron.core.utils.graph_capture import CudaGraphRecorder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-workers 0"


@functools.cache
def trained(name: str, number: int, *flags: str) -> Outcome:
    """The outcome of a run. `number` tells apart runs with equal flags."""
    words = [*GRAPH_RUNS[name], *flags]
    assert words in RUNS.values(), "a command line that no test on a CPU checks"
    return train(DATA, base=" ".join(words))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each capture."""
    found: list[int] = []
    capture = CudaGraphRecorder.capture
    monkeypatch.setattr(CudaGraphRecorder, "capture", lambda self, run: found.append(1) or capture(self, run))
    return found


@pytest.mark.parametrize("optimizer", [[], ["--optimizer-cuda-graph"]], ids=["micro-batches", "and optimizer"])
@pytest.mark.parametrize("name", GRAPH_RUNS)
def test_graphs_give_the_bits_of_the_eager_run(name: str, optimizer: list[str], captures: list[int]) -> None:
    eager = trained(name, 0, DETERMINISTIC)
    graphed = trained(name, 0, DETERMINISTIC, *GRAPHS, *optimizer)
    assert len(captures) == 1 + len(optimizer), "nothing was captured, so nothing was compared"
    assert_equal(name, graphed, eager)


@pytest.mark.parametrize("name", PART_RUNS)
def test_graphs_of_parts_give_the_bits_of_the_eager_run(name: str, captures: list[int]) -> None:
    eager = trained(name, 0, DETERMINISTIC)
    graphed = trained(name, 0, DETERMINISTIC, *PARTS)
    assert len(captures) == 2 * PART_RUNS[name], "each part has a forward and a backward"
    assert_equal(name, graphed, eager)


def assert_equal(name: str, graphed: Outcome, eager: Outcome) -> None:
    assert len(eager.steps) == GRAPH_STEPS and eager.losses[0] != eager.losses[-1]
    print(name, [a - b for a, b in zip(eager.losses, graphed.losses, strict=True)])
    assert graphed.losses == eager.losses
    assert [step.grad_norm for step in graphed.steps] == [step.grad_norm for step in eager.steps]
    assert not differences(graphed.at_end, eager.at_end)


@pytest.mark.parametrize("name", ["gpt", "gpt dropout", "llama"])
def test_the_fastest_kernels_in_graphs_differ_no_more_than_from_run_to_run(name: str, captures: list[int]) -> None:
    eager = [trained(name, number).losses for number in range(3)]
    graphed = trained(name, 0, *GRAPHS, "--optimizer-cuda-graph").losses
    assert len(captures) == 2
    spread = max(abs(x - y) for a, b in itertools.combinations(eager, 2) for x, y in zip(a, b, strict=True))
    apart = min(max(abs(x - y) for x, y in zip(graphed, one, strict=True)) for one in eager)
    print(f"{name}: eager runs differ by up to {spread:.2e}, graphs by {apart:.2e}")
    assert apart <= 2 * spread


def test_what_waits_for_the_device_cannot_be_captured() -> None:
    recorder = CudaGraphRecorder(torch.device("cuda"))
    number = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError, match="captur"):
        recorder.capture(number.item)
