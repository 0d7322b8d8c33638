"""The data of a run: an iterator over micro-batches for each split, which continues where the run stopped."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.utils.data import default_collate

from megatron.core.collectives import all_reduce
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset
from megatron.core.exceptions import UserError
from megatron.core.timers import Timers
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import collate_gpt
from megatron.training.data.bert_data import collate_bert
from megatron.training.data.loaders import build_data_iterator
from megatron.training.data.step_data import StepData
from megatron.training.data.t5_data import collate_t5
from megatron.training.launch.environment import Environment
from megatron.training.state import TrainState


@dataclass(frozen=True)
class WholeSet:
    """A validation set that each evaluation reads from its first to its last sample (--full-validation)."""

    open: Callable[[], StepData]
    """Returns the micro-batches of one pass."""
    num_samples: int
    """Samples of a pass. Rows without a sample fill up the last global batch."""


@dataclass
class Splits:
    """Micro-batches of each split. None: the split has no data or is not used."""

    train: StepData
    valid: StepData | None
    """With --full-validation it is empty, and `whole_valid` has the data."""
    test: StepData | None
    whole_valid: WholeSet | None = None

    def close(self) -> None:
        """Ends the processes that read ahead."""
        for split in (self.train, self.valid, self.test):
            if split is not None:
                split.close()


def build_splits(
    config: PretrainConfig,
    environment: Environment,
    state: TrainState,
    datasets: Sequence[Any],
    timers: Timers | None = None,
) -> Splits:
    """Makes iterators over the data sets of a run (train, valid, test), which continue at the counts of `state`.

    Each rank reads its own data. In a user's script, some tensor and pipeline parallel ranks may have None instead of a
    data set, and then get no iterator. Collective over these ranks. Raises UserError on all ranks if there is no
    training data, or less than the run consumes. `timers` measure the reads of training data.
    """
    available = _on_any_rank([dataset is not None for dataset in datasets], environment)
    if not available[0] and not config.evaluation.skip_train:
        raise UserError(
            "there is no training data: give --data-path (and a --split with a training part) or --mock-data"
        )

    def split(dataset: Any, consumed: int, micro_batch_size: int, fill_to: int | None = None) -> StepData:
        if dataset is None:
            return step_data(config, environment, None, micro_batch_size)
        groups, data = environment.groups, config.data
        iterator = build_data_iterator(
            dataset,
            micro_batch_size=micro_batch_size,
            consumed_samples=consumed,
            data_parallel_rank=groups.rank("dp"),
            data_parallel_size=groups.size("dp"),
            num_workers=data.num_workers,
            dataloader_type="single" if fill_to is not None else data.dataloader_type or "single",
            fill_to=fill_to,
            seed=config.seed,
            collate=collate_of(dataset),
            pin_memory=environment.device.type == "cuda",
        )
        return step_data(config, environment, iterator, micro_batch_size)

    train, valid, test = datasets
    evaluates = config.evaluation.eval_iters > 0
    finished = state.iteration >= config.training.train_iters
    reads = available[0] and not finished
    sizes = config.training.micro_batch_size, config.evaluation.micro_batch_size(config.training)
    consumed = state.consumed_train_samples
    training = split(train, consumed, sizes[0]) if reads else step_data(config, environment, iter(()), sizes[0])
    training.timers = timers
    evaluation = split(test, 0, sizes[1]) if available[2] and evaluates else None
    if config.evaluation.full_validation and available[1] and evaluates:
        if valid is None:
            raise UserError("--full-validation: every rank needs the validation set, to know how long it is")
        batch = config.evaluation.global_batch_size(config.training)
        whole = WholeSet(lambda: split(valid, 0, sizes[1], batch), len(valid))
        return Splits(training, step_data(config, environment, iter(()), sizes[1]), evaluation, whole)
    return Splits(
        train=training,
        valid=split(valid, state.consumed_valid_samples, sizes[1]) if available[1] and evaluates else None,
        test=evaluation,
    )


def step_data(
    config: PretrainConfig,
    environment: Environment,
    micro_batches: Iterator[Any] | None,
    micro_batch_size: int | None = None,
) -> StepData:
    """Returns this rank's micro-batches as StepData; of --micro-batch-size samples if nothing else is given."""
    return StepData(
        micro_batches,
        micro_batch_size=micro_batch_size or config.training.micro_batch_size,
        data_parallel_rank=environment.groups.rank("dp"),
        data_parallel_size=environment.groups.size("dp"),
        seed=config.seed,
    )


def _on_any_rank(flags: Sequence[bool], environment: Environment) -> list[bool]:
    """Elementwise "or" of the flags over the ranks that compute on the same samples."""
    found = torch.tensor(flags, dtype=torch.int32, device=environment.device)
    groups = environment.groups
    if groups.size("mp") > 1:
        all_reduce(found, groups.mp, ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def collate_of(dataset: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns the function that makes a batch from items: a record for this package's data sets (a `Batch` unless they
    are BERT's or T5's), torch's default for others."""
    if isinstance(dataset, BlendedDataset):
        return collate_of(dataset.datasets[0])
    if isinstance(dataset, BERTMaskedWordPieceDataset):
        return collate_bert
    if isinstance(dataset, T5MaskedWordPieceDataset):
        return collate_t5
    if isinstance(dataset, MegatronDataset):
        return collate_gpt
    return lambda items: default_collate(list(items))
