"""--balanced-packing: each row once, ranks and stages with equal work, in an order that is a function of the batch."""

import itertools
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.command_lines import SMALL, configured, problems_of
from support.runs import train

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.pipeline_parallel.action_lists import all_rank_actions
from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.simulator import Costs, simulate_actions
from megatron.core.pipeline_parallel.stages import Pipeline
from megatron.data.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTLowLevelDataset
from megatron.data.datasets.utils import Split
from megatron.facades import global_vars
from megatron.facades.training import build_pretraining_data_loader
from megatron.training.data.balanced_batches import BalancedSampler, balanced_order
from megatron.training.data.samplers import DataParallelShard
from megatron.training.data.splits import build_splits
from megatron.training.state import TrainState

# ---------------------------------------------------------------------------------------------------------------------
# Idle time of documents from 100 to 32k tokens, in the simulator

LENGTH = 32768


def cost_of_rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the costs of a global batch of rows of 32k tokens of log-normal documents, in order and balanced. They
    are those of a layer of Llama 3 8B: 218 million multiplications for each token, and 8192 for each key it sees."""
    documents = MockGPTLowLevelDataset(SimpleNamespace(eod=1, vocab_size=9))
    lengths = np.random.default_rng(seed).lognormal(np.log(1800), 1.2, 60 * count)
    documents.sequence_lengths = lengths.clip(100, LENGTH).astype(np.int32)
    config = GPTDatasetConfig(seed, LENGTH, split="1", tokenizer=documents.tokenizer, reset_attention_mask=True)
    rows = GPTDataset(documents, None, range(len(lengths)), count, Split.train, config)
    each = [rows.document_lengths(row) for row in range(count)]
    assert all(lengths.sum() == LENGTH for lengths in each)
    costs = np.array([LENGTH + 8192 / 218e6 * (lengths * (lengths + 1) / 2).sum() for lengths in each])
    balanced = BalancedSampler([list(range(count))], [count], rows, DataParallelShard(1))
    return costs, costs[[row for micro_batch in balanced for row in micro_batch if row is not None]]


@dataclass(frozen=True)
class UnevenCosts(Costs):
    of_micro_batch: tuple[float, ...] = ()

    def duration(self, action: Action) -> float:
        return super().duration(action) * self.of_micro_batch[action.micro_batch]


def idle(micro_batches: np.ndarray, ranks: int, stages: int) -> float:
    """Returns the fraction of the time that data parallel ranks, each a pipeline, wait until the last one is done."""
    pipeline = Pipeline(stages)
    lists = all_rank_actions(Schedule("1f1b", pipeline, len(micro_batches) // ranks))
    costs = [UnevenCosts(of_micro_batch=tuple(micro_batches[rank::ranks])) for rank in range(ranks)]
    longest = max(simulate_actions(lists, pipeline, each).length for each in costs)
    return 1 - 3 * micro_batches.sum() / (ranks * longest)


@pytest.mark.parametrize(("stages", "count"), [(1, 16), (4, 16), (4, 64)])
def test_idle_time_of_uneven_documents_at_least_halves(stages: int, count: int) -> None:
    """With 16 micro-batches the pipeline's own filling and draining, as with equal rows, does not count."""
    filling = idle(np.ones(8 * count), 8, stages) if count < 64 else 0.0
    before = after = 0.0
    for seed in range(3):
        plain, balanced = cost_of_rows(8 * count, seed)
        before += idle(plain, 8, stages) - filling
        after += idle(balanced, 8, stages) - filling
    assert after < before / 2, (before / 3, after / 3)


# ---------------------------------------------------------------------------------------------------------------------
# The order


@pytest.mark.parametrize("seed", range(20))
def test_each_row_comes_once_and_no_rank_has_much_more_than_another(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks, size, count = (int(random.choice([1, 2, 4, 8])) for _ in range(3))
    costs = random.lognormal(10, 1.2, ranks * size * 2 * count).astype(np.int64)
    order = balanced_order(costs, size)
    assert sorted(order.tolist()) == list(range(len(costs)))
    after = costs[order].reshape(2 * count, ranks, size).sum(2)
    assert np.ptp(after) <= np.ptp(costs)
    assert np.ptp(after.sum(0)) <= np.ptp(after)
    # Ranks wait for each other in every micro-batch if they exchange tokens of experts or gather weights.
    assert np.ptp(after, axis=1).sum() <= 2 * np.ptp(after)


def test_rows_of_a_micro_batch_make_up_for_each_other() -> None:
    costs = np.array([8, 1, 7, 2, 6, 3, 5, 4])
    assert costs[balanced_order(costs, 2)].reshape(4, 2).sum(1).tolist() == [9, 9, 9, 9]
    assert costs[balanced_order(costs, 1)].tolist() == [1, 3, 5, 7, 8, 6, 4, 2]


# ---------------------------------------------------------------------------------------------------------------------
# Batches of a run

DOCUMENTS = "--reset-attention-mask --balanced-packing"


def rows_of(dataset: Any, flags: str, steps: int, ranks: int = 1, **counts: int) -> list[list[list[int]]]:
    """Returns the ids of each micro-batch of each step, in the order in which ranks take them in turn."""
    config = configured(f"--num-workers 0 --seq-length 16 --max-position-embeddings 16 {flags}", base=SMALL)
    parts = []
    for rank in range(ranks):
        groups = ProcessGroupCollection.from_grid(RankGrid(ranks), rank)
        environment: Any = SimpleNamespace(groups=groups, device=torch.device("cpu"))
        train = build_splits(config, environment, TrainState(**counts), [dataset, None, None]).train
        parts.append([next(train).sample_ids.tolist() for _ in range(steps)])
    return [list(each) for each in zip(*parts, strict=True)]


def test_a_batch_has_its_rows_in_the_same_order_for_any_ranks_and_after_a_restart(build_dataset: Any) -> None:
    dataset = build_dataset(400, reset_attention_mask=True)
    for index in range(60):
        bounds = np.unique(dataset[index]["cu_seqlens"].numpy())
        lengths = dataset.document_lengths(index)
        assert np.diff(bounds).tolist() == lengths[lengths > 0].tolist()
    flags = f"{DOCUMENTS} --micro-batch-size 2 --global-batch-size 16 --rampup-batch-size 8 8 16 --train-iters 30"
    alone = rows_of(dataset, flags, 4 + 4 + 8 + 8)
    ids = [number for step in alone for rows in step for number in rows]
    ends = [0, 8, 16, 32, 48]
    batches = [ids[first:last] for first, last in itertools.pairwise(ends)]
    assert all(sorted(batch) == list(range(*ends[n : n + 2])) != batch for n, batch in enumerate(batches))
    assert [rows for step in rows_of(dataset, flags, 2 + 2 + 4 + 4, 2) for rows in step] == [rows for (rows,) in alone]
    assert rows_of(dataset, flags, 8 + 8, iteration=2, consumed_train_samples=16) == alone[8:]
    assert rows_of(dataset, flags.replace(DOCUMENTS, ""), 2) == [[[0, 1]], [[2, 3]]]
    cyclic = rows_of(dataset, f"{flags} --dataloader-type cyclic", 4)
    plain = rows_of(dataset, f"{flags} --dataloader-type cyclic".replace(DOCUMENTS, ""), 4)
    first, expected = ([number for (rows,) in each for number in rows] for each in (cyclic, plain))
    assert Counter(first) == Counter(expected) and first != expected


def test_the_loss_of_a_step_is_that_of_the_same_rows_in_another_order(corpus: str) -> None:
    flags = f"--fp64 --train-iters 3 --hidden-dropout 0 --attention-dropout 0 --data-path {corpus}"
    plain, balanced = (train(f"{flags} --reset-attention-mask {more}") for more in ("", "--balanced-packing"))
    assert balanced.sample_ids != plain.sample_ids and balanced.losses == pytest.approx(plain.losses, abs=1e-11)


def test_data_that_cannot_be_ordered_is_refused() -> None:
    with pytest.raises(UserError, match="data is a list, which has no document_lengths"):
        rows_of([1, 2, 3], DOCUMENTS, 1)
    assert problems_of(f"{DOCUMENTS} --dataloader-type external") == [
        "--balanced-packing orders the rows of data sets, which --dataloader-type external does not have; leave it out"
    ]
    run = SimpleNamespace(config=configured(DOCUMENTS, base=SMALL), environment=mock.Mock())
    with (
        mock.patch.object(global_vars, "current_run", return_value=run),
        pytest.raises(UserError, match="needs pretrain"),
    ):
        build_pretraining_data_loader([1, 2, 3], 0)
