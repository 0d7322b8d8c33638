"""The data of a run: an iterator over micro-batches for each split, from where the run stands."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.utils.data import default_collate

from megatron.core.collectives import all_reduce
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.exceptions import UserError
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import collate_gpt
from megatron.training.data.loaders import build_data_iterator
from megatron.training.data.step_data import StepData
from megatron.training.launch.environment import Environment
from megatron.training.state import TrainState


@dataclass
class Splits:
    """Micro-batches of each split; None: there is no such data, or nothing is asked of it."""

    train: StepData
    valid: StepData | None
    test: StepData | None

    def close(self) -> None:
        """End the processes that read ahead."""
        for split in (self.train, self.valid, self.test):
            if split is not None:
                split.close()


def build_splits(
    config: PretrainConfig, environment: Environment, state: TrainState, datasets: Sequence[Any]
) -> Splits:
    """Iterators over the data sets of a run (train, valid, test), continuing where `state` stands.

    Every rank reads its own data. A script's other ranks may have none (None in place of a data set) where one of their
    tensor and pipeline parallel ranks has; what they are handed is then empty. Collective over such ranks. Raises
    UserError, the same on all ranks, when there is no data to train on, or less than the run is to consume.
    """
    there = _on_any_rank([dataset is not None for dataset in datasets], environment)
    if not there[0] and not config.evaluation.skip_train:
        raise UserError(
            "there is no training data: give --data-path (and a --split with a training part) or --mock-data"
        )

    def split(dataset: Any, consumed: int) -> StepData:
        if dataset is None:
            return step_data(config, environment, None)
        groups, data = environment.groups, config.data
        iterator = build_data_iterator(
            dataset,
            micro_batch_size=config.training.micro_batch_size,
            consumed_samples=consumed,
            data_parallel_rank=groups.rank("dp"),
            data_parallel_size=groups.size("dp"),
            num_workers=data.num_workers,
            dataloader_type=data.dataloader_type or "single",
            seed=config.seed,
            collate=collate_of(dataset),
            pin_memory=environment.device.type == "cuda",
        )
        return step_data(config, environment, iterator)

    train, valid, test = datasets
    evaluates = config.evaluation.eval_iters > 0
    finished = state.iteration >= config.training.train_iters
    return Splits(
        train=step_data(config, environment, iter(()))
        if not there[0] or finished
        else split(train, state.consumed_train_samples),
        valid=split(valid, state.consumed_valid_samples) if there[1] and evaluates else None,
        test=split(test, 0) if there[2] and evaluates else None,
    )


def step_data(config: PretrainConfig, environment: Environment, micro_batches: Iterator[Any] | None) -> StepData:
    """Some micro-batches as those of this rank in the run."""
    return StepData(
        micro_batches,
        micro_batch_size=config.training.micro_batch_size,
        data_parallel_rank=environment.groups.rank("dp"),
        data_parallel_size=environment.groups.size("dp"),
        seed=config.seed,
    )


def _on_any_rank(flags: Sequence[bool], environment: Environment) -> list[bool]:
    """Each flag, or that of any other rank that computes on the same samples."""
    found = torch.tensor(flags, dtype=torch.int32, device=environment.device)
    groups = environment.groups
    if groups.size("mp") > 1:
        all_reduce(found, groups.mp, ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def collate_of(dataset: Any) -> Callable[[Sequence[Any]], Any]:
    """How the items of a data set become a batch: ours a `Batch`, a user's whatever torch makes of them."""
    if isinstance(dataset, MegatronDataset | BlendedDataset):
        return collate_gpt
    return lambda items: default_collate(list(items))
