"""The data sets of a run, and how samples are made from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag, literal_text, not_a_flag, too_small
from megatron.core.exceptions import UserError
from megatron.data.datasets.utils import parse_split

_READS_FILES = "mock_data!=True"
_SHARDING = "the cyclic order is one permutation of the whole data set, so that it is the same for every layout"
_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
_WHOLE = ("data_path", "data_args_path", "per_split_data_args_path", "data_stages")
_MOST_WORKERS = 1024
DATA_SOURCES = frozenset((*_WHOLE, *_PER_SPLIT))
"""Fields that name data sets."""


@dataclass(kw_only=True, frozen=True)
class DataConfig:
    """Data sets, their division into training, validation and test data, and the contents of a sample."""

    data_path: list[str] | None = flag(None, nargs="*", from_checkpoint=True)
    """Prefix of a preprocessed data set, without .bin and .idx, or the URL of one in an object store
    (s3://bucket/prefix). Several prefixes make a blend; a number before each is its weight."""

    split: str | None = flag(None, from_checkpoint=True)
    """Shares of training, validation and test data. Default: 969,30,1; a line says when the default is used. Applies to
    --data-path and --data-args-path."""

    train_data_path: list[str] | None = flag(None, nargs="*", from_checkpoint=True, only_with="skip_train!=True")
    """Training data, given separately; the syntax is that of --data-path."""

    valid_data_path: list[str] | None = flag(None, nargs="*", from_checkpoint=True, only_with="eval_iters!=0")
    """Validation data, given separately; the syntax is that of --data-path."""

    test_data_path: list[str] | None = flag(None, nargs="*", from_checkpoint=True, only_with="eval_iters!=0")
    """Test data, given separately; the syntax is that of --data-path."""

    data_args_path: str | None = flag(None, from_checkpoint=True)
    """File that contains the words of --data-path."""

    data_stages: str | None = flag(None, families=["gpt"], from_checkpoint=True)
    """JSON file with stages of the training data, whose blend changes at given samples: a list of objects with
    from_sample and data_path (as in --data-path, with weights)."""

    per_split_data_args_path: str | None = flag(None, from_checkpoint=True)
    """JSON file with the keys train, valid and test; each value is written like --data-path."""

    data_contract: str | None = None
    """Data contract of a plan (tools/plan.py): a run whose tokenizer, data sets, ratios, lengths or deduplication are
    not those of the plan is refused, and the clause is named. In a --config file, a path from the file's folder.
    --dry-run then needs neither data nor tokenizer."""

    data_cache_path: str | None = flag(None, only_with=_READS_FILES)
    """Folder for index caches; a folder beside each data set when not given."""

    object_storage_cache_path: str | None = flag(None, families=["gpt"], only_with=_READS_FILES)
    """Local folder for copies of the .idx files of data sets in object stores (--data-path s3://bucket/prefix). Without
    it every process reads them into memory."""

    mock_data: bool = False
    """Train on made-up data, to try a run without a data set. Replaces the data sets that earlier flags of the command
    line name."""

    seq_length: int
    """Tokens in a sample. Required."""

    datasets_of_script: bool | None = not_a_flag(None)
    """True if the script builds its own data sets. They may need no files, so --data-path is not required."""

    encoder_seq_length: int | None = None
    """T5: tokens of the encoder's part of a sample. Another spelling of --seq-length."""

    decoder_seq_length: int | None = flag(None, families=["t5"])
    """T5: tokens of the decoder's part of a sample. Required."""

    num_workers: int = flag(2, only_with="dataloader_type!=external")
    """Processes per rank that read and prepare batches; 0: the training process does it. The number does not change the
    samples."""

    dataloader_type: Literal["single", "cyclic", "external"] | None = None
    """Order of samples. single (the default): the data set's own order, once. cyclic: a new permutation in each epoch.
    external: the script's datasets provider returns iterables of this rank's micro-batches, which are used as they
    are."""

    data_sharding: bool = flag(
        True,
        off="--no-data-sharding",
        off_help="With --dataloader-type cyclic: each data parallel rank shuffles all of the data.",
        no_effect=_SHARDING,
    )
    """With --dataloader-type cyclic: each data parallel rank shuffles only its own part of the data."""

    mmap_bin_files: bool = flag(
        True,
        off="--no-mmap-bin-files",
        off_help="Read from data files instead of mapping them into memory.",
        no_effect="data files are always read by position, as fast as from a map; a map of a file that becomes shorter "
        "would end the run without a word",
    )
    """Map data files into memory instead of reading from them."""

    dataloader_fast_cache_load: bool = flag(False, no_effect="opening a dataset is fast, and files are always checked")
    """Skip checks when index caches are opened."""

    dataloader_defer_npy_index_mmap: bool = flag(False, no_effect="index arrays are mapped and read at first access")
    """Map index arrays when they are first read."""

    create_attention_mask_in_dataloader: bool = flag(
        True,
        off="--no-create-attention-mask-in-dataloader",
        no_effect="batches carry the lengths of documents instead of square masks",
    )
    """Put square attention masks into batches."""

    reset_position_ids: bool = flag(False, families=["gpt"])
    """Start positions at 0 after each end-of-document token."""

    reset_attention_mask: bool = flag(False, families=["gpt"])
    """Let tokens attend to their own document only."""

    balanced_packing: bool = flag(False, families=["gpt"], only_with="reset_attention_mask", or_with="sft")
    """Order the rows of each global batch by the cost of attention within their documents, so that micro-batches cost
    about the same and data parallel ranks and pipeline stages wait less. The batch has the same rows, and the order is
    the same for every layout."""

    eod_mask_loss: bool = flag(False, families=["gpt"])
    """Leave end-of-document tokens out of the loss."""

    allow_ambiguous_pad_tokens: bool = False
    """Treat the tokenizer's pad id as padding even if another special token has the same id."""

    mid_level_dataset_surplus: float = flag(0.005, only_with=_READS_FILES)
    """Fraction by which each data set of a blend is built larger than its share, as a margin for rounding."""

    num_dataset_builder_threads: int = flag(1, only_with=_READS_FILES)
    """Data sets of a blend that are indexed in parallel."""

    mask_prob: float = flag(0.15, families=["bert", "t5"])
    """BERT and T5: fraction of the tokens of a sample that are masked."""

    short_seq_prob: float = flag(0.1, families=["bert", "t5"])
    """BERT and T5: fraction of the samples that are shorter than --seq-length."""

    fim_data: bool = flag(False, families=["gpt"])
    """Rearrange documents for fill in the middle. Each one is cut at two random characters into prefix, middle and
    suffix, and the middle moves to the end."""

    fim_rate: float = flag(0.5, only_with="fim_data")
    """With --fim-data: fraction of the documents that are rearranged."""

    fim_spm_rate: float = flag(0.5, only_with="fim_data")
    """With --fim-data: fraction of the rearranged documents that put the suffix first."""

    fim_split_sample: str | None = flag(None, only_with="fim_data", from_checkpoint=True)
    """With --fim-data: token that divides documents into fragments, which are rearranged one by one."""

    fim_fragment_rate: float | None = flag(None, only_with="fim_split_sample")
    """With --fim-split-sample: fraction of the fragments that are rearranged; --fim-rate when not given."""

    fim_no_prefix: str | None = flag(None, only_with="fim_data", from_checkpoint=True)
    """With --fim-data: texts that begin with this are not rearranged."""

    fim_prefix_token: str = flag("<fim_prefix>", only_with="fim_data", from_checkpoint=True)
    """With --fim-data: token before the prefix. It must be a single token of the tokenizer. The same holds for the
    other tokens of fill in the middle."""

    fim_middle_token: str = flag("<fim_middle>", only_with="fim_data", from_checkpoint=True)
    """With --fim-data: token before the middle."""

    fim_suffix_token: str = flag("<fim_suffix>", only_with="fim_data", from_checkpoint=True)
    """With --fim-data: token before the suffix."""

    fim_eod_token: str | None = flag(None, only_with="fim_data", from_checkpoint=True)
    """With --fim-data: token that ends a document; the tokenizer's when not given."""

    fim_pad_token: str = flag("<fim_pad>", no_effect="samples that become shorter are padded without loss")
    """Token that fills samples that become shorter."""

    def sources(self) -> list[str]:
        """Returns the fields that say where the data is. All data paths of single splits count as one source."""
        whole = [field for field in _WHOLE if getattr(self, field) is not None]
        per_split = [field for field in _PER_SPLIT if getattr(self, field) is not None]
        return whole + per_split[:1] + (["mock_data"] if self.mock_data else [])

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`. Looks at no file."""
        yield from too_small(self, ("seq_length", "num_dataset_builder_threads"), 1)
        yield from too_small(self, ("num_workers", "mid_level_dataset_surplus"), 0)
        if self.num_workers > _MOST_WORKERS:
            yield f"{{num_workers}}: each rank would start so many processes; at most {_MOST_WORKERS} are possible"
        yield from too_small(self, ("decoder_seq_length",), 1)
        if not 0 < self.mask_prob < 1:
            yield "{mask_prob}: expected a fraction between 0 and 1, such as 0.15"
        if not 0 <= self.short_seq_prob <= 1:
            yield "{short_seq_prob}: expected a fraction from 0 to 1, such as 0.1"
        for field in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
            if not 0 <= (getattr(self, field) or 0) <= 1:
                yield f"{{{field}}}: expected a fraction from 0 to 1, such as 0.5"
        if self.data_stages is not None and self.dataloader_type in ("cyclic", "external"):
            yield "{data_stages:name} gives the order of samples, which {dataloader_type} would replace; leave it out"
        if self.balanced_packing and self.dataloader_type == "external":
            yield "{balanced_packing} orders the rows of data sets, which {dataloader_type} does not have; leave it out"
        sources = self.sources()
        if len(sources) > 1:
            names = " and ".join(f"{{{field}:name}}" for field in sources)
            yield f"{names} say in {len(sources)} ways where data is; give one"
        for field in ("data_path", *_PER_SPLIT):
            if getattr(self, field) == []:
                yield f"{{{field}:name}}: a prefix is missing"
        if self.split is None:
            return
        if len(sources) == 1 and sources[0] in (*_PER_SPLIT, "per_split_data_args_path"):
            yield f"{{split}} does not go with {{{sources[0]}:name}}, whose data is used whole; leave one out"
        try:
            parse_split(self.split)
        except UserError as error:
            yield literal_text(str(error))
