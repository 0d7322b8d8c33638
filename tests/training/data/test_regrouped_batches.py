"""--hybrid-context-parallel: each document of a global batch once, with its own tokens, on the ranks of one plan."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data.datasets.test_sft_dataset import Words, write
from support.command_lines import SMALL, configured

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.tokens import SequencePart
from megatron.data.datasets.gpt_dataset import GPTDatasetConfig
from megatron.data.datasets.sft_dataset import SFTConversations, SFTDataset
from megatron.data.datasets.utils import Split
from megatron.training.data.batch import Batch, collate_gpt
from megatron.training.data.regrouped_batches import (
    Document,
    RegroupedDocuments,
    RegroupedRows,
    RegroupedSampler,
    Regrouping,
)
from megatron.training.data.splits import build_splits
from megatron.training.state import TrainState

FLAGS = (
    "--num-workers 0 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 "
    "--reset-attention-mask --calculate-per-token-loss --attention-dropout 0 --hidden-dropout 0 "
    "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 4"
)


def steps_of(dataset: Any, ranks: int, context: int, count: int, **counts: int) -> list[list[list[Batch]]]:
    """Returns the micro-batches of each rank, by step."""
    config, found = configured(FLAGS, base=SMALL, ranks=ranks), []
    for rank in range(ranks):
        groups = ProcessGroupCollection.from_grid(RankGrid(ranks, context=context), rank)
        environment: Any = SimpleNamespace(groups=groups, device=torch.device("cpu"))
        data = build_splits(config, environment, TrainState(**counts), [dataset, None, None]).train
        steps = []
        for step in range(count):
            data.begin(step)
            steps.append([next(data) for _ in range(data.count(0))])
        found.append(steps)
    return [list(step) for step in zip(*found, strict=True)]


def documents_in(batch: Batch) -> Iterator[tuple[int, ...]]:
    """The tokens, labels, mask and positions of each document of a micro-batch, padding left out."""
    bounds = batch.cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        rows = [row[0, start:end] for row in (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)]
        if rows[0].any() or rows[1].any():
            yield tuple(int(value) for row in rows for value in row)


@pytest.mark.parametrize(("ranks", "context"), [(4, 2), (4, 1), (8, 2)])
def test_each_document_of_a_global_batch_is_on_the_ranks_of_one_plan(
    build_dataset: Any, ranks: int, context: int
) -> None:
    dataset = build_dataset(80, reset_attention_mask=True, reset_position_ids=True)
    steps = steps_of(dataset, ranks, context, 3)
    widths = set()
    for number, step in enumerate(steps):
        found = []
        for rank, batches in enumerate(step):
            assert all(batch.of_step == len(batches) for batch in batches)
            for batch in batches:
                width = batch.local_cp_size
                widths.add(width)
                assert batch.tokens.shape[1] % (2 * width if width > 1 else 1) == 0
                assert batch.tokens.shape[1] <= 4 * width and batch.max_seqlen == batch.cu_seqlens.diff().max()
                if rank % width == 0:
                    found += documents_in(batch)
                mates = step[rank - rank % width : rank - rank % width + width]
                assert all(any(torch.equal(batch.tokens, other.tokens) for other in mate) for mate in mates)
        expected = [
            document
            for row in range(8 * number, 8 * number + 8)
            for document in documents_in(collate_gpt([dataset[row]]))
        ]
        assert sorted(found) == sorted(expected) and len(found) > 8
    assert widths == {1, 2, 4}
    again = steps_of(dataset, ranks, context, 1, iteration=2, consumed_train_samples=16)
    assert all(
        torch.equal(one.tokens, other.tokens)
        for one, other in zip(itertools.chain(*again[0]), itertools.chain(*steps[2]), strict=True)
    )


def test_conversations_leave_their_rows_without_the_padding(tmp_path: Path) -> None:
    sizes = [2, 3, 4, 8, 1, 2, 5, 3, 7, 1, 1, 6]
    path = write(tmp_path / "talks.jsonl", sizes)
    config = GPTDatasetConfig(1, 16, blend=([path], None), split="1,0,0", tokenizer=Words())
    conversations = SFTConversations(path, Words())
    dataset = SFTDataset(conversations, path, range(len(sizes)), None, Split.train, config)
    rows, found = RegroupedRows(dataset, 1), []
    for rank in range(4):
        how = Regrouping(rank, 4, 4, 1, rows_end_with_padding=True)
        for (planned,) in RegroupedSampler([[*range(len(dataset))]], [len(dataset)], dataset, how):
            if rank % planned.num_ranks == 0:
                batch = rows[planned]
                documents = [*documents_in(batch)]
                assert batch.tokens.numel() < sum(len(each) // 4 for each in documents) + 2 * planned.num_ranks
                found += documents
    whole = [collate_gpt([dataset[row]]) for row in range(len(dataset))]
    assert sorted(found) == sorted(document for row in whole for document in documents_in(row))
    assert len(found) == len(sizes)


class Rows:
    """Rows of 12 tokens, each with these lengths of documents, of which the last is padding."""

    lengths = ((5, 3, 4), (12, 0), (1, 2, 9))

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        row = 0 if idx is None else idx
        bounds = np.cumsum([0, *self.lengths[row]])
        tokens = torch.arange(12) + 100 * row + 1
        return {
            "tokens": tokens,
            "labels": tokens + 1,
            "loss_mask": torch.zeros(12) if idx is None else torch.ones(12),
            "position_ids": torch.arange(12),
            "cu_seqlens": torch.tensor([*bounds, *[12] * (13 - len(bounds))], dtype=torch.int32),
            "max_seqlen": torch.tensor(12),
            "sample_id": torch.tensor(-1 if idx is None else idx),
        }

    def document_lengths(self, idx: int) -> np.ndarray:
        return np.array(self.lengths[idx])


def planned(rank: int, ranks: int, **settings: Any) -> list[RegroupedDocuments]:
    regrouping = Regrouping(rank, ranks, 6, 1, **settings)
    return [each for (each,) in RegroupedSampler([[0], [1, 2]], [3], Rows(), regrouping)]


def test_padding_is_left_out_and_a_rank_without_documents_gets_one_without_loss() -> None:
    whole = [document for each in planned(0, 1 << 1) for document in each.documents]
    assert Document(0, 8, 4) in whole + [d for each in planned(1, 2) for d in each.documents]
    plans = [planned(rank, 8, multiple=2, rows_end_with_padding=True) for rank in range(8)]
    assert sorted({d for plan in plans for each in plan for d in each.documents if d.row is not None}, key=str) == [
        Document(0, 0, 5), Document(0, 5, 3), Document(1, 0, 12), Document(2, 0, 1), Document(2, 1, 2)
    ]  # fmt: skip
    (idle,) = plans[7]
    assert idle == RegroupedDocuments((Document(None, 0, 2),), 1, 1)
    batch = RegroupedRows(Rows(), 2)[idle]  # type: ignore[arg-type]
    assert batch.tokens.tolist() == [[1, 2]] and not batch.loss_mask.any() and batch.sample_ids.tolist() == [-1]


def test_documents_lie_end_to_end_and_are_padded() -> None:
    rows: Any = RegroupedRows(Rows(), 4)  # type: ignore[arg-type]
    batch = rows[RegroupedDocuments((Document(2, 1, 2), Document(0, 0, 5)), 1, 3)]
    assert batch.tokens.tolist() == [[202, 203, 1, 2, 3, 4, 5, 0]]
    assert batch.labels.tolist() == [[203, 204, 2, 3, 4, 5, 6, 0]]
    assert batch.loss_mask.tolist() == [[1.0] * 7 + [0.0]]
    assert batch.position_ids.tolist() == [[1, 2, 0, 1, 2, 3, 4, 0]]
    assert batch.cu_seqlens.tolist() == [0, 2, 7, 8] and batch.max_seqlen == 5
    assert (batch.local_cp_size, batch.of_step, batch.sample_ids.tolist()) == (1, 3, [2, 0])
    assert rows[RegroupedDocuments((Document(1, 0, 12),), 2, 1)].tokens.shape == (1, 16)
    joined = rows[RegroupedDocuments((Document(2, 0, 3),), 1, 1)]  # its row ends a document after its first token
    assert joined.cu_seqlens.tolist() == [0, 1, 3, 4]


def test_mistakes_are_told() -> None:
    rows: Any = RegroupedRows(Rows(), 1)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match="sample 0: --hybrid-context-parallel: a document of 4 tokens from token 0 has no end"
    ):
        rows[RegroupedDocuments((Document(0, 0, 4),), 1, 1)]
    with pytest.raises(UserError, match="data is a list, which has no document_lengths"):
        RegroupedSampler([[0]], [1], [1], Regrouping(0, 2, 4, 1))
    batch = rows[RegroupedDocuments((Document(1, 0, 12),), 2, 1)]
    for part in (None, SequencePart(0, 2), SequencePart(0, 4)):
        with pytest.raises(UserError, match=r"2 ranks share this micro-batch, not those of .* sequence_part\(groups, "):
            batch.part(part)
    whole = dataclasses.replace(batch, local_cp_size=1)
    assert whole.part(None) is whole


def test_a_loop_that_does_not_count_micro_batches_is_told(build_dataset: Any) -> None:
    groups = ProcessGroupCollection.from_grid(RankGrid(4), 0)
    environment: Any = SimpleNamespace(groups=groups, device=torch.device("cpu"))
    config = configured(FLAGS, base=SMALL, ranks=4)
    dataset = build_dataset(20, reset_attention_mask=True)
    data = build_splits(config, environment, TrainState(), [dataset, None, None]).train
    for step in range(2):
        data.begin(step)
        for _ in range(data.count(0)):
            next(data)
    with pytest.raises(UserError, match=r"needs pretrain\(\), which counts the micro-batches"):
        data.begin(2)
        next(build_splits(config, environment, TrainState(), [dataset, None, None]).train)
    data.begin(2)
    assert data.count(5) == 5, "20 samples are two global batches of 8, and a part of one"
    with pytest.raises(StopIteration):
        next(data)
