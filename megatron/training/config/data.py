"""What the model reads."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_yet


@dataclass(kw_only=True, frozen=True)
class DataConfig:
    """Data sets, their split, and how samples are made of them."""

    data_path: list[str] | None = flag(None, nargs="*")
    """Prefix of a preprocessed data set, without .bin and .idx; or several, each after its weight."""

    split: str | None = None
    """Shares of training, validation and test data, such as 969,30,1 (which is taken, and said, when not given)."""

    train_data_path: list[str] | None = flag(None, nargs="*")
    """Training data apart from the others, as --data-path."""

    valid_data_path: list[str] | None = flag(None, nargs="*")
    """Validation data apart from the others, as --data-path."""

    test_data_path: list[str] | None = flag(None, nargs="*")
    """Test data apart from the others, as --data-path."""

    data_args_path: str | None = None
    """File that holds the words of --data-path."""

    per_split_data_args_path: str | None = None
    """JSON file with the keys train, valid and test, each with the words of --data-path."""

    data_cache_path: str | None = None
    """Folder for index caches; beside each data set when not given."""

    mock_data: bool = False
    """Made-up data, to try a run without any."""

    seq_length: int
    """Tokens of a sample. Required."""

    encoder_seq_length: int | None = None
    """For GPT another spelling of --seq-length."""

    decoder_seq_length: int | None = not_yet(None)
    """Tokens of the decoder's part of a sample, for encoder-decoder models."""

    num_workers: int = 2
    """Processes a rank that prepare batches; 0: the training process does it. The samples are the same."""

    dataloader_type: Literal["single", "cyclic", "external"] | None = flag(None, supported=[None, "single", "cyclic"])
    """Order of samples: the data set's own, once (single), or a new permutation for each pass (cyclic); single when not
    given."""

    data_sharding: bool = flag(True, off="--no-data-sharding", only_with="dataloader_type=cyclic")
    """With --dataloader-type cyclic: shuffle within parts of the data set."""

    mmap_bin_files: bool = flag(True, off="--no-mmap-bin-files")
    """Map data files into memory instead of reading from them."""

    create_attention_mask_in_dataloader: bool = flag(
        True,
        off="--no-create-attention-mask-in-dataloader",
        no_effect="masks travel as the lengths of documents; no square mask is made",
    )
    """Put square attention masks into batches."""

    reset_position_ids: bool = False
    """Positions begin anew after each end of document."""

    reset_attention_mask: bool = False
    """Tokens attend to their own document only."""

    eod_mask_loss: bool = False
    """Take no loss at ends of documents."""

    allow_ambiguous_pad_tokens: bool = False
    """Take the tokenizer's pad id for padding even where it is also the id of another special token."""

    mid_level_dataset_surplus: float = 0.005
    """Part by which each data set of a blend is made larger than its share, against rounding."""

    num_dataset_builder_threads: int = 1
    """Data sets of a blend that are indexed at a time."""

    fim_data: bool = not_yet(False)
    """Rearrange samples for fill in the middle."""

    fim_rate: float = flag(0.5, only_with="fim_data")
    """With --fim-data: part of the samples that are rearranged."""

    fim_spm_rate: float = flag(0.5, only_with="fim_data")
    """With --fim-data: part of those that put the suffix first."""
