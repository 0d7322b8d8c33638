"""The data of a run: an iterator over micro-batches for each split, which continues where the run stopped."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.utils.data import default_collate

from megatron.core.communication.collectives import all_reduce
from megatron.core.exceptions import UserError
from megatron.core.timers import Timers
from megatron.data.datasets.bert_dataset import BERTMaskedWordPieceDataset
from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.staged_blend import StagedBlend
from megatron.data.datasets.t5_dataset import T5MaskedWordPieceDataset
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.training import EvaluationConfig
from megatron.training.data.batch import collate_gpt
from megatron.training.data.loaders import build_data_iterator
from megatron.training.data.masked_data import collate_bert, collate_t5
from megatron.training.data.regrouped_batches import Regrouping, work_of_token
from megatron.training.data.step_data import StepData
from megatron.training.launch.environment import Environment
from megatron.training.state import TrainState


@dataclass(frozen=True)
class ValidationSet:
    """A data set that every evaluation on the validation data reads."""

    open: Callable[[], StepData]
    """Returns the micro-batches of the next evaluation."""
    num_samples: int | None = None
    """With --full-validation: samples of one pass, which every evaluation reads. Rows without a sample fill up the last
    global batch. None without the flag."""
    name: str | None = None
    """With --multiple-validation-sets: its name in the log."""


@dataclass
class Splits:
    """Micro-batches of each split. None: the split has no data or is not used."""

    train: StepData
    valid: StepData | None
    """With --full-validation or --multiple-validation-sets it is empty, and `valid_sets` have the data."""
    test: StepData | None
    valid_sets: Sequence[ValidationSet] = ()

    def close(self) -> None:
        """Ends the processes that read ahead."""
        opened = [valid_set.open() for valid_set in self.valid_sets if valid_set.num_samples is None]
        for split in (self.train, self.valid, self.test, *opened):
            if split is not None:
                split.close()


def build_splits(
    config: PretrainConfig,
    environment: Environment,
    state: TrainState,
    datasets: Sequence[Any],
    timers: Timers | None = None,
) -> Splits:
    """Makes iterators over the data sets of a run (train, valid, test). Training data continues at the counts of
    `state`. Evaluations begin at the first sample; with --eval-fresh-samples, validation continues where it stopped.

    Each rank reads its own data. In a user's script, some tensor and pipeline parallel ranks may have None instead of a
    data set; they get no iterator. Collective over these ranks. Raises UserError on all ranks if there is no training
    data, or less than the run consumes. `timers` measure the reads of training data. With --multiple-validation-sets
    the validation data is a list of data sets.
    """
    available = _on_any_rank([dataset is not None for dataset in datasets], environment)
    if config.data.dataloader_type == "external":
        _check_external(datasets, available[0] or config.evaluation.skip_train)
    if not available[0] and not config.evaluation.skip_train:
        raise UserError(
            "there is no training data: give --data-path (and a --split with a training part) or --mock-data"
        )

    def split(
        dataset: object,
        consumed: int,
        micro_batch_size: int,
        fill_to: int | None = None,
        timers: Timers | None = None,
        restarts: bool = False,
        batch_sizes: Iterable[int] | None = None,
        regrouping: Regrouping | None = None,
    ) -> StepData:
        if dataset is None:
            return step_data(config, environment, None, micro_batch_size, timers)
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
            restarts=restarts,
            batch_sizes=batch_sizes,
            regrouping=regrouping,
        )
        return step_data(config, environment, iterator, micro_batch_size, timers, regroups=regrouping is not None)

    train, valid, test = datasets
    evaluates = config.evaluation.eval_iters > 0
    finished = state.iteration >= config.training.train_iters
    reads = available[0] and not finished
    sizes = config.training.micro_batch_size, config.evaluation.micro_batch_size(config.training)
    fresh, consumed = config.evaluation.eval_fresh_samples, state.consumed_train_samples
    first_valid = state.consumed_valid_samples if fresh else 0
    regrouping = _regrouping(config, environment)
    training = (
        split(
            train,
            consumed,
            sizes[0],
            timers=timers,
            batch_sizes=_planned_batches(config, environment, consumed),
            regrouping=regrouping,
        )
        if reads
        else step_data(config, environment, iter(()), sizes[0])
    )
    evaluation = split(test, 0, sizes[1], restarts=not fresh) if available[2] and evaluates else None
    several, whole = config.evaluation.multiple_validation_sets, config.evaluation.full_validation
    if (several or whole) and available[1] and evaluates:

        def open_set(dataset: Any) -> Callable[[], StepData]:
            if whole:
                batch = config.evaluation.global_batch_size(config.training)
                return lambda: split(dataset, 0, sizes[1], batch)
            opened = split(dataset, first_valid, sizes[1], restarts=not fresh)
            return lambda: opened

        sets = tuple(
            ValidationSet(open_set(dataset), len(dataset) if whole else None, name)
            for name, dataset in _validation_sets(config.evaluation, valid)
        )
        return Splits(training, step_data(config, environment, iter(()), sizes[1]) if sets else None, evaluation, sets)
    validation = split(valid, first_valid, sizes[1], restarts=not fresh) if available[1] and evaluates else None
    return Splits(train=training, valid=validation, test=evaluation)


def _planned_batches(config: PretrainConfig, environment: Environment, consumed: int) -> Iterator[int] | None:
    """Returns the sizes of the global batches whose rows --balanced-packing orders, or whose documents
    --hybrid-context-parallel places; None: neither has an effect."""
    planned = config.data.balanced_packing or config.transformer.hybrid_context_parallel
    if not planned or not (config.data.reset_attention_mask or config.training.sft):
        return None
    ranks = environment.groups.size("dp")
    return BatchSchedule.from_config(config.training, ranks, config.data.seq_length).sizes_after(consumed)


def _regrouping(config: PretrainConfig, environment: Environment) -> Regrouping | None:
    """Returns how --hybrid-context-parallel places documents; None without it."""
    groups, transformer = environment.groups, config.transformer
    if not transformer.hybrid_context_parallel:
        return None
    assert transformer.max_seqlen_per_dp_cp_rank is not None
    return Regrouping(
        groups.rank("dp_cp"),
        groups.size("dp_cp"),
        transformer.max_seqlen_per_dp_cp_rank,
        work_of_token(transformer),
        groups.size("tp") if transformer.sequence_parallel else 1,
        rows_end_with_padding=config.training.sft,
    )


def _check_external(datasets: Sequence[object], has_training_data: bool) -> None:
    """Raises UserError unless the script's provider has returned iterables of batches."""
    for name, dataset in zip(("training", "validation", "test"), datasets, strict=True):
        each = dataset if isinstance(dataset, list | tuple) and name == "validation" else [dataset]
        for one in each:
            if one is not None and not isinstance(one, Iterable):
                raise UserError(
                    f"--dataloader-type external: the {name} data of the script's provider is a {type(one).__name__}, "
                    "not an iterable of this rank's micro-batches; return one, or leave the flag out"
                )
    if not has_training_data:
        raise UserError(
            "--dataloader-type external: the script's datasets provider returns no training data; it must return an "
            "iterable of this rank's micro-batches (docs/data.md), as pretrain_gpt.py does not"
        )


def _validation_sets(evaluation: EvaluationConfig, valid: object) -> Iterator[tuple[str | None, Any]]:
    """Yields the name of each validation set, and its data. Raises UserError if this rank does not have the data."""
    several = evaluation.multiple_validation_sets
    flags = "--multiple-validation-sets" if several else "--full-validation"
    if valid is None:
        raise UserError(f"{flags}: every rank needs the validation data, to know how many sets it has and their length")
    if not several:
        yield None, valid
        return
    if not isinstance(valid, list | tuple):
        raise UserError(f"{flags}: the script builds one validation set; it must return a list of them")
    names = evaluation.validation_set_names or [str(number) for number in range(len(valid))]
    if len(names) != len(valid):
        raise UserError(f"--validation-set-names: {len(names)} names for {len(valid)} validation sets")
    yield from ((name, dataset) for name, dataset in zip(names, valid, strict=True) if dataset is not None)


def step_data(
    config: PretrainConfig,
    environment: Environment,
    micro_batches: Iterator[object] | None,
    micro_batch_size: int | None = None,
    timers: Timers | None = None,
    regroups: bool = False,
) -> StepData:
    """Returns this rank's micro-batches as StepData; of --micro-batch-size samples if nothing else is given. `timers`
    measure the reads."""
    return StepData(
        micro_batches,
        micro_batch_size=micro_batch_size or config.training.micro_batch_size,
        data_parallel_rank=environment.groups.rank("dp"),
        data_parallel_size=environment.groups.size("dp"),
        seed=config.seed,
        timers=timers,
        regroups=regroups,
    )


def _on_any_rank(flags: Sequence[bool], environment: Environment) -> list[bool]:
    """Returns the elementwise "or" of the flags over the ranks that compute on the same samples."""
    found = torch.tensor(flags, dtype=torch.int32, device=environment.device)
    groups = environment.groups
    if groups.size("mp") > 1:
        all_reduce(found, groups.mp, ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def collate_of(dataset: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns the function that makes a batch from items. For data sets of this package it makes a record: a `Batch`,
    or the record of BERT or T5. Another data set may have a method `collate(items)`; without it, it is torch's
    default."""
    own = getattr(dataset, "collate", None)
    if own is not None and not isinstance(dataset, MegatronDataset):
        return own  # type: ignore[no-any-return]
    if isinstance(dataset, BlendedDataset | StagedBlend):
        return collate_of(dataset.datasets[0])
    if isinstance(dataset, BERTMaskedWordPieceDataset):
        return collate_bert
    if isinstance(dataset, T5MaskedWordPieceDataset):
        return collate_t5
    if isinstance(dataset, MegatronDataset):
        return collate_gpt
    return lambda items: default_collate(list(items))
