"""The data of a run: an iterator over micro-batches for each split, from where the run stands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.exceptions import UserError
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import collate_gpt
from megatron.training.data.loaders import build_data_iterator
from megatron.training.data.step_data import StepData
from megatron.training.initialize import Environment
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

    Raises UserError when there is no data to train on, or less than the run is to consume.
    """
    train, valid, test = datasets
    if train is None and not config.evaluation.skip_train:
        raise UserError(
            "there is no training data: give --data-path (and a --split with a training part) or --mock-data"
        )

    def split(dataset: Any, consumed: int) -> StepData:
        groups, data = environment.groups, config.data
        iterator = build_data_iterator(
            dataset,
            micro_batch_size=config.training.micro_batch_size,
            consumed_samples=consumed,
            data_parallel_rank=groups.rank("dp"),
            data_parallel_size=groups.size("dp"),
            num_workers=data.num_workers,
            dataloader_type=data.dataloader_type or "single",
            seed=config.model.transformer.seed,
            collate=collate_of(dataset),
            pin_memory=environment.device.type == "cuda",
        )
        return StepData(
            iterator,
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_rank=groups.rank("dp"),
            data_parallel_size=groups.size("dp"),
            seed=config.model.transformer.seed,
        )

    evaluates = config.evaluation.eval_iters > 0
    finished = state.iteration >= config.training.train_iters
    return Splits(
        train=StepData(iter(()), micro_batch_size=1)
        if train is None or finished
        else split(train, state.consumed_train_samples),
        valid=split(valid, state.consumed_valid_samples) if valid is not None and evaluates else None,
        test=split(test, 0) if test is not None and evaluates else None,
    )


def collate_of(dataset: Any) -> Callable[[Sequence[Any]], Any]:
    """How the items of a data set become a batch: ours a `Batch`, a user's whatever torch makes of them."""
    if isinstance(dataset, MegatronDataset | BlendedDataset):
        return collate_gpt
    return lambda items: default_collate(list(items))
