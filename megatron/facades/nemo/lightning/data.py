"""The data of a run: NeMo's sampler, data modules that name files, and loaders of a user."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from megatron.facades.nemo.lightning.arguments import Argument, ArgumentValues, Foreign
from megatron.facades.nemo.lightning.bases import defines
from megatron.facades.nemo.lightning.flags import Flags
from megatron.facades.pretrain import gpt_entry_script
from megatron.training.data.batch import CollatedDataset
from megatron.training.providers import Context, SampleCounts

Stage = Literal["fit", "validate", "test"]

_COUNTED = "the checkpoint that a run loads says where its data continue"

LOADERS = {"train": "train_dataloader", "valid": "val_dataloader", "test": "test_dataloader"}
"""Splits, and the method of a data module that returns a split's loader."""
OF_STAGE: Mapping[str, Sequence[str]] = {"fit": ("train", "valid"), "validate": ("valid",), "test": ("test",)}
"""The splits that a stage reads."""


class MegatronDataSampler(ArgumentValues):
    """Sizes of batches, and the order of samples."""

    table: Sequence[Argument] = (
        Argument("seq_len", None, "seq_length"),
        Argument("micro_batch_size", 4, "micro_batch_size"),
        Argument("global_batch_size", 8, "global_batch_size"),
        Argument("rampup_batch_size", None, "rampup_batch_size"),
        Argument("dataloader_type", "single"),
        Argument("init_consumed_samples", 0, refusal=f"leave it out; {_COUNTED}"),
        Argument("init_global_step", 0, refusal=f"leave it out; {_COUNTED}"),
        Argument("output_log", True, note="a log line every log_every_n_steps steps"),
        Argument("decoder_seq_len", refusal="leave it out; this runs decoder models"),
    )
    dataloader_type: str

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings. "batch", NeMo's order for fine-tuning, is the order "single"."""
        super().give_flags(flags)
        flags.give("dataloader_type", "single" if self.dataloader_type == "batch" else self.dataloader_type)


class StageData:
    """The data sets of a stage. Of a data module with `give_flags` the run builds them; of another one, and of loaders,
    it takes the data set and the collate function of each loader, and reads them in its own order."""

    def __init__(self, stage: str, datamodule: Foreign, loaders: Mapping[str, Foreign]) -> None:
        self.stage, self.datamodule = stage, datamodule
        own = any(defines(datamodule, method) for method in LOADERS.values())
        self.reads_flags = hasattr(datamodule, "give_flags") and not own
        self.loaders = {name: loaders.get(name) for name in OF_STAGE.get(stage, ())}
        self.takes_whole_test = False
        """Whether a test reads the whole test set, which the run then treats as its validation set."""

    def open(self) -> None:
        """Asks the data module for its loaders, if none are given. It must be set up."""
        if self.datamodule is None or self.reads_flags:
            return
        for name in self.loaders:
            method = getattr(self.datamodule, LOADERS[name], None)
            self.loaders[name] = method() if callable(method) else None

    def give_flags(self, flags: Flags, sampler: Foreign, accumulated: int) -> None:
        """Adds the settings of data and batches. `sampler`: a MegatronDataSampler, or None; then a loader's batch is a
        micro-batch, of which each rank takes `accumulated` for a step."""
        if self.reads_flags:
            self.datamodule.give_flags(flags)
            return
        sampler = sampler or getattr(self.datamodule, "data_sampler", None)
        if sampler is not None:
            sampler.give_flags(flags)
        for name, loader in self.loaders.items():
            if isinstance(loader, list | tuple | dict) or type(loader).__name__ == "CombinedLoader":
                flags.refuse(f"the {name} loader", "give one loader; several validation sets are --valid-data-path")
            elif loader is not None and not isinstance(loader, Iterable):
                flags.refuse(f"the {name} loader", f"a {type(loader).__name__} is not a loader of batches")
        first = next((loader for loader in self.loaders.values() if loader is not None), None)
        if first is None:
            methods = " or ".join(f"{LOADERS[name]}()" for name in self.loaders)
            flags.refuse(f"{self.stage}: no data", f"give a datamodule with {methods}, or loaders")
        elif not isinstance(first, DataLoader):
            flags.give("dataloader_type", "external")
        elif sampler is None:
            _give_batches(flags, first, accumulated)

    def build_datasets(self, context: Context, counts: SampleCounts) -> Sequence[object]:
        """Returns the data sets of the train, valid and test split; None for those that the stage does not read."""
        found: dict[str, object] = {name: _dataset_of(loader) for name, loader in self.loaders.items()}
        if self.reads_flags:
            counts = dataclasses.replace(counts, test=None) if self.takes_whole_test else counts
            built = gpt_entry_script().build_datasets(context, counts)
            found = {name: built[number] for number, name in enumerate(LOADERS) if name in self.loaders}
        if self.takes_whole_test:
            found["valid"] = found.pop("test", None)
        return [found.get(name) for name in LOADERS]


def _dataset_of(loader: Foreign) -> object:
    """Returns what a run reads of a loader: the data set of torch's, or any other iterable as it is."""
    if not isinstance(loader, DataLoader):
        return loader
    collate: Foreign = loader.collate_fn
    return CollatedDataset(loader.dataset, collate)


def _give_batches(flags: Flags, loader: Foreign, accumulated: int) -> None:
    """Adds the settings of a torch DataLoader that has its own batches."""
    if loader.batch_size is None:
        flags.refuse(
            "the DataLoader has a batch_sampler", "give a batch_size, or a MegatronDataSampler to the strategy"
        )
        return
    flags.give("micro_batch_size", loader.batch_size)
    flags.give("num_workers", loader.num_workers)
    if accumulated > 1:
        flags.give("global_batch_size", loader.batch_size * accumulated * data_parallel_size(flags))
    if isinstance(loader.sampler, RandomSampler):
        flags.give("dataloader_type", "cyclic")
    elif not isinstance(loader.sampler, SequentialSampler):
        flags.refuse("the DataLoader has a sampler", "leave it out; the run divides the samples over ranks itself")


def data_parallel_size(flags: Flags) -> int:
    """Returns the number of data parallel ranks by the settings so far."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    ranks = flags.world_size
    for name in names:
        ranks //= int(str(flags.values.get(name) or 1))
    return max(1, ranks)
