"""megatron/training/data/samplers.py: one stream of samples for every layout, which can be entered anywhere."""

import itertools

import numpy as np
import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.training.data.samplers import (
    CyclicSampler,
    DataParallelShard,
    MegatronCyclicSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    SequentialSampler,
    permuted,
)

LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 1), (1, 8), (3, 2)]


def stream(make, micro_batch_size, num_ranks, count):
    """The samples of all ranks in the order of the run: micro-batch by micro-batch, rank by rank."""
    ranks = [iter(make(DataParallelShard(micro_batch_size, rank, num_ranks))) for rank in range(num_ranks)]
    found = []
    while len(found) < count:
        for rank in ranks:
            found += next(rank)
    return found[:count]


@pytest.mark.parametrize(("micro_batch_size", "num_ranks"), LAYOUTS)
def test_single_is_the_same_for_every_layout(micro_batch_size, num_ranks):
    found = stream(lambda shard: SequentialSampler(1000, 96, shard), micro_batch_size, num_ranks, 480)
    assert found == list(range(96, 576))


@pytest.mark.parametrize(("micro_batch_size", "num_ranks"), LAYOUTS)
def test_cyclic_is_the_same_for_every_layout_and_across_epochs(micro_batch_size, num_ranks):
    def make(start):
        return lambda shard: CyclicSampler(101, start, shard, seed=7)

    expected = stream(make(0), 1, 1, 480)
    assert stream(make(0), micro_batch_size, num_ranks, 480) == expected
    assert stream(make(72), micro_batch_size, num_ranks, 408) == expected[72:]


def test_cyclic_takes_every_sample_once_an_epoch_in_ever_new_order():
    sampler = CyclicSampler(101, 0, DataParallelShard(1), seed=7)
    epochs = [sampler.samples_at(np.arange(101 * k, 101 * (k + 1), dtype=np.uint64)) for k in range(4)]
    assert all(sorted(epoch) == list(range(101)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = CyclicSampler(101, 0, DataParallelShard(1), seed=8).samples_at(np.arange(101, dtype=np.uint64))
    assert other != epochs[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_permuted_is_a_permutation(size):
    positions = np.arange(size, dtype=np.uint64)
    for key in (0, 1, 2**64 - 1):
        assert sorted(permuted(positions, size, np.uint64(key)).tolist()) == list(range(size))


def test_permutations_look_random():
    """Each place of 8 is hit equally often by each element: chi-square over 4000 keys, 49 degrees of freedom."""
    positions = np.tile(np.arange(8, dtype=np.uint64), 4000)
    goals = permuted(positions, 8, np.repeat(np.arange(4000, dtype=np.uint64), 8))
    counts = np.zeros((8, 8))
    np.add.at(counts, (positions.astype(int), goals.astype(int)), 1)
    assert ((counts - 500) ** 2 / 500).sum() < 100
    big = permuted(np.arange(100_000, dtype=np.uint64), 100_000, np.uint64(3)).astype(float)
    assert abs(np.corrcoef(big[:-1], big[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(big, np.arange(100_000))[0, 1]) < 0.02


def test_what_does_not_fill_a_batch_is_left_out_or_filled_up():
    def read(fill_to):
        samplers = [SequentialSampler(21, 4, DataParallelShard(2, rank, 2), fill_to) for rank in range(2)]
        assert len(samplers[0]) == len(samplers[1]) == len(list(samplers[0]))
        return [list(sampler) for sampler in samplers]

    assert read(None) == [[[4, 5], [8, 9], [12, 13], [16, 17]], [[6, 7], [10, 11], [14, 15], [18, 19]]]
    filled = read(8)
    assert all(len(batches) == 6 for batches in filled)
    assert [batches[4] for batches in filled] == [[20, None], [None, None]]
    positions = [position for batches in filled for batch in batches for position in batch]
    assert sorted(position for position in positions if position is not None) == list(range(4, 21))
    with pytest.raises(UserError, match="batches of 6"):
        SequentialSampler(21, 4, DataParallelShard(2, 0, 2), 6)


def test_nothing_left_is_said():
    with pytest.raises(UserError, match=r"all 21 samples .* consumed \(21 so far\)"):
        SequentialSampler(21, 21, DataParallelShard(2))
    with pytest.raises(UserError, match="no samples"):
        CyclicSampler(0, 0, DataParallelShard(2), 1)
    with pytest.raises(UserError, match="--micro-batch-size 0"):
        DataParallelShard(0)
    with pytest.raises(UserError, match="rank 2 of 2"):
        DataParallelShard(1, 2, 2)


@pytest.mark.parametrize("data_sharding", [True, False])
def test_megatron_lm_cyclic_order(data_sharding):
    total, micro_batch, ranks, consumed = 103, 2, 4, 104 // 8 * 8 + 16
    active = total - total % 8
    epoch, within = divmod(consumed, active)
    generator = torch.Generator().manual_seed(epoch)
    for rank in range(ranks):
        generator.manual_seed(epoch)
        if data_sharding:
            bucket = total // 8 * micro_batch
            order = torch.randperm(bucket, generator=generator) + rank * bucket
            expected = order[within // ranks :].tolist()
        else:
            order = torch.randperm(total // micro_batch * micro_batch, generator=generator)
            expected = order[within:][rank::ranks].tolist()
        sampler = MegatronCyclicSampler(total, consumed, DataParallelShard(micro_batch, rank, ranks), data_sharding)
        batches = list(itertools.islice(sampler, len(expected) // micro_batch))
        assert [sample for batch in batches for sample in batch] == expected[
            : len(expected) // micro_batch * micro_batch
        ]
        next_epoch = list(itertools.islice(sampler, 40))
        assert len(next_epoch) == 40
    with pytest.raises(UserError, match="do not fill a batch"):
        MegatronCyclicSampler(7, 0, DataParallelShard(2, 0, 4))


def test_samplers_with_megatron_lms_arguments():
    ours = SequentialSampler(11, 4, DataParallelShard(2, 1, 2))
    theirs = MegatronPretrainingSampler(
        total_samples=11, consumed_samples=4, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2
    )
    assert list(theirs) == list(ours) == [[6, 7]]
    with pytest.raises(UserError, match="drop_last"):
        MegatronPretrainingSampler(11, 4, 2, 1, 2, drop_last=False)
    cyclic = MegatronCyclicSampler(23, 8, DataParallelShard(2, 1, 2), False)
    random = MegatronPretrainingRandomSampler(range(23), 23, 8, 2, 1, 2, data_sharding=False)
    assert list(itertools.islice(random, 9)) == list(itertools.islice(cyclic, 9))
