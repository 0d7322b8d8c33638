"""Data modules that name files, or made-up data. The run builds their data sets."""

from collections.abc import Mapping, Sequence

from megatron.facades.nemo.lightning.arguments import Argument, ArgumentValues, Foreign
from megatron.facades.nemo.lightning.data import MegatronDataSampler
from megatron.facades.nemo.lightning.flags import Flags

_ENOUGH = "a run reads as many samples as its steps and evaluations need"
_COUNTED = "leave it out; the checkpoint that a run loads says where its data continue"
_PINNED = "batches for a GPU are always in page-locked memory"
_MASKS = "batches carry the lengths of documents instead of square masks"
_STAY = "workers of evaluations stay between them"

_BATCHES: Sequence[Argument] = (
    Argument("seq_length", 2048, "seq_length"),
    Argument("tokenizer"),
    Argument("micro_batch_size", 4, "micro_batch_size"),
    Argument("global_batch_size", 8, "global_batch_size"),
    Argument("rampup_batch_size", None, "rampup_batch_size"),
)
_WORKERS: Sequence[Argument] = (
    Argument("num_workers", 8, "num_workers"),
    Argument("pin_memory", True, note=_PINNED),
    Argument("persistent_workers", False, note=_STAY),
)
_SAMPLES = ("num_train_samples", "num_val_samples", "num_test_samples")

PRE_TRAINING: Sequence[Argument] = (
    Argument("paths"),
    *_BATCHES,
    *_WORKERS,
    Argument("reset_position_ids", False, "reset_position_ids"),
    Argument("create_attention_mask", False, note=_MASKS),
    Argument("reset_attention_mask", False, "reset_attention_mask"),
    Argument("eod_mask_loss", False, "eod_mask_loss"),
    Argument("seed", 1234, "seed"),
    Argument("split", "900,50,50"),
    Argument("index_mapping_dir", None, "data_cache_path"),
    Argument("num_dataset_builder_threads", 1, "num_dataset_builder_threads"),
    *(Argument(name, note=_ENOUGH) for name in _SAMPLES),
    Argument("dataloader_type", "single", "dataloader_type"),
    Argument("init_consumed_samples", 0, refusal=_COUNTED),
    Argument("init_global_step", 0, refusal=_COUNTED),
    Argument("output_log", True, note="a log line every log_every_n_steps steps"),
    Argument("dataset_cls", refusal="leave it out; give a data module with loaders for data sets of your own"),
    Argument("mmap_bin_files", True, "mmap_bin_files"),
    Argument("object_storage_cache_path", None, "object_storage_cache_path"),
)
"""The arguments of NeMo's PreTrainingDataModule."""

MOCK: Sequence[Argument] = (
    *_BATCHES,
    Argument("num_train_samples", 10**7, note=_ENOUGH),
    Argument("num_val_samples", 10**4),
    Argument("num_test_samples", 10**4),
    *_WORKERS,
    Argument("create_attention_mask", False, note=_MASKS),
    Argument("vocab_file", refusal="give a tokenizer"),
    Argument("merges_file", refusal="give a tokenizer"),
)
"""The arguments of NeMo's MockDataModule."""

_SPLITS = {"train": "train_data_path", "validation": "valid_data_path", "test": "test_data_path"}


class _FlagData(ArgumentValues):
    """A data module whose data sets follow from flags."""

    lightning_class = "core", "LightningDataModule"
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    rampup_batch_size: Sequence[int] | None
    dataloader_type: str = "single"

    def __init__(self, *args: object, **kwargs: object) -> None:
        for each in type(self).__mro__:
            if each.__name__ == "LightningDataModule":
                each.__init__(self)  # type: ignore[misc]
                break
        super().__init__(*args, **kwargs)

    @property
    def data_sampler(self) -> MegatronDataSampler:
        """The sizes of batches."""
        sizes = (self.seq_length, self.micro_batch_size, self.global_batch_size, self.rampup_batch_size)
        return MegatronDataSampler(*sizes, self.dataloader_type)


class PreTrainingDataModule(_FlagData):
    """Preprocessed data: `paths` is a prefix, a list of prefixes (with weights before them, if given), or a dictionary
    of these with the keys train, validation and test."""

    table = PRE_TRAINING
    paths: Foreign
    split: str | None

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings of data and batches."""
        super().give_flags(flags)
        if not isinstance(self.paths, Mapping):
            flags.give("data_path", _words(self.paths))
            flags.give("split", self.split)
            return
        for name, paths in self.paths.items():
            if name not in _SPLITS:
                flags.refuse(f"PreTrainingDataModule(paths={{{name!r}: ...}})", f"the keys are {', '.join(_SPLITS)}")
            else:
                flags.give(_SPLITS[name], _words(paths))


def _words(paths: Foreign) -> list[str]:
    """Returns prefixes, with their weights, as words of --data-path."""
    return [str(path) for path in paths] if isinstance(paths, list | tuple) else [str(paths)]


class MockDataModule(_FlagData):
    """Made-up data, to try a run."""

    table = MOCK
    num_val_samples: int
    num_test_samples: int
    vocab_size = 50257
    """Size of the vocabulary without a tokenizer and a size of the model: that of GPT-2, NeMo's default tokenizer."""

    def batches_of_whole_set(self, stage: str) -> int:
        """Returns the number of global batches of an evaluation that reads its whole split, at least 1."""
        samples = self.num_test_samples if stage == "test" else self.num_val_samples
        return max(1, samples // self.global_batch_size)

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings of data and batches."""
        super().give_flags(flags)
        flags.give("mock_data", True)
