"""Every model chunk of a rank sees every micro-batch, once, and knows where it stands."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.timers import Timers
from megatron.training.data.batch import Batch
from megatron.training.data.step_data import StepData, step_data_of


def micro_batches(count: int, log: list[int] | None = None):
    """Batches of two samples; `log` tells which were read."""
    for number in range(count):
        if log is not None:
            log.append(number)
        yield SimpleNamespace(number=number, sample_ids=[2 * number, 2 * number + 1])


def second_of_three(source) -> StepData:
    return StepData(source, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=3, seed=7)


def test_one_chunk_draws_from_it_directly():
    data = second_of_three(micro_batches(4))
    (iterator,) = data.iterators(1)
    assert iterator is data and step_data_of(data.iterators(1)) is data
    data.begin(5)
    assert [next(iterator).number for _ in range(2)] == [0, 1]
    assert iterator.sample_ids == [[0, 1], [2, 3]]
    assert (iterator.rng_position.seed, iterator.rng_position.iteration, iterator.rng_position.first_sample) == (
        7,
        5,
        (1 * 3 + 1) * 2,
    )
    data.begin(6)
    assert next(iterator).number == 2 and iterator.sample_ids == [[4, 5]] and iterator.rng_position.first_sample == 2


@pytest.mark.parametrize("by_script", [False, True])
def test_a_read_is_measured_once(by_script):
    """A forward step of Megatron-LM's scripts runs the timer of the same name around its read."""
    timers = Timers(2, "max")
    data = second_of_three(micro_batches(2))
    data.timers = timers
    timer = timers("batch-generator", log_level=2)
    if by_script:
        timer.start()
    next(data)
    assert timer.running == by_script
    if by_script:
        timer.stop()
    assert timer.elapsed() > 0


def test_every_chunk_draws_every_micro_batch_once_at_its_own_pace():
    """In the order of an interleaved schedule; each micro-batch is read once, and held no longer than needed."""
    read: list[int] = []
    data = second_of_three(micro_batches(8, read))
    first, second = chunks = data.iterators(2)
    for iteration in range(2):
        data.begin(iteration)
        seen: list[list[int]] = [[], []]
        for chunk in (0, 0, 1, 0, 1, 1, 0, 1):
            batch = next(chunks[chunk])
            seen[chunk].append(batch.number)
            number = len(seen[chunk]) - 1
            assert chunks[chunk].rng_position == data.rng_position_of(number) and chunks[chunk].iteration == iteration
            assert chunks[chunk].sample_ids[-1] == [2 * batch.number, 2 * batch.number + 1]
            assert len(data._kept) == abs(first.drawn - second.drawn)
        assert seen == [[4 * iteration + number for number in range(4)]] * 2
        assert data.sample_ids == [[2 * n, 2 * n + 1] for n in seen[0]]  # each sample once
    assert read == list(range(8)) and data.iterators(2) == chunks and step_data_of(chunks) is data
    with pytest.raises(StopIteration):
        next(first)


def test_a_chunk_that_draws_nothing_holds_nothing_up():
    """Megatron-LM's scripts read nothing on stages in the middle."""
    data = second_of_three(micro_batches(9))
    idle, busy = data.iterators(2)
    for iteration in range(3):
        data.begin(iteration)
        assert [next(busy).number for _ in range(3)] == [3 * iteration + number for number in range(3)]
        assert len(data._kept) == 3  # of one step at most
    assert idle.drawn == 0


def test_chunks_that_drew_differently_are_a_mistake_of_the_schedule():
    data = second_of_three(micro_batches(9))
    first, second = data.iterators(2)
    data.begin(0)
    next(first), next(first), next(second)
    with pytest.raises(AssertionError, match="different numbers of micro-batches"):
        data.begin(1)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_step_that_is_kept_can_be_drawn_again(chunks):
    log: list[int] = []
    data = second_of_three(micro_batches(9, log))
    assert not data.rewind()
    data.keep_step()

    def draw() -> list[int]:
        return [next(iterator).number for iterator in data.iterators(chunks) for _ in range(2)]

    for iteration, numbers in enumerate(([0, 1], [2, 3])):
        data.begin(iteration)
        assert draw() == numbers * chunks and data.rewind()
        assert draw() == numbers * chunks and data.sample_ids[-1] == [2 * numbers[1], 2 * numbers[1] + 1]
    assert log == [0, 1, 2, 3]


def test_kept_batches_are_out_of_the_memory_that_workers_share():
    tokens = torch.zeros(2).share_memory_()
    batch = Batch(tokens, tokens, tokens, tokens, sample_ids=torch.tensor([1]))
    for shared in (batch, {"tokens": tokens, "more": [tokens]}):
        data = StepData(iter([shared]), micro_batch_size=1)
        data.keep_step()
        drawn = next(data)
        found = drawn["more"][0] if isinstance(drawn, dict) else drawn.tokens
        assert not found.is_shared() and torch.equal(found, tokens)
        assert data.rewind() and next(data) is drawn


def test_a_rank_without_data_hands_on_none():
    data = StepData(None, micro_batch_size=1)
    assert data.iterators(1) == [None] and data.iterators(2) == [None, None]
    data.begin(3)
    assert data.rng_position_of(2).first_sample == 2
    data.close()
