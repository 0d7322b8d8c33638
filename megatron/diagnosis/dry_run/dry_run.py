"""--dry-run: steps and data of a run, without process groups, devices or memory.

The memory of each rank comes from building its part of the model (`rank_memory`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.data.datasets.blend_stages import blend_until
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.datasets.object_store import is_url
from megatron.data.datasets.utils import Blend, normalize, parse_split
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.build import build_tokenizer
from megatron.diagnosis.memory.peak import RankPeak, peaks_or_reason
from megatron.diagnosis.memory.rank_memory import MemoryBytes, RankMemory, parameters_of_model, rank_memory
from megatron.diagnosis.planning.regrouping import PackedDocuments, RegroupingGain, packed_documents, packs_documents
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.checkpoint_checks import check_before_build, check_vocabulary
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.data_checks import check_data_of_run
from megatron.training.data.data_contract import keep_data_contract, planned_tokenizer
from megatron.training.data.sources import blends, stages_of_run
from megatron.training.log.throughput import flops_of_samples
from megatron.training.providers import Providers
from megatron.training.setup.sizes import resolve_auto_layout, vocabulary_rows


@dataclass(frozen=True)
class Passes:
    """How often a run passes over one dataset."""

    name: str
    tokens: int
    """Tokens of its part for training."""
    epochs: float | None
    """None: the length of training is not given."""


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run."""

    parameters: int
    """Number of parameters of the whole model, without padding of the vocabulary."""
    vocab_size: int
    padded_vocab_size: int
    ranks: tuple[RankMemory, ...]
    """What each rank holds."""
    tokens_per_step: int
    microbatches_per_step: int
    flops_per_step: int
    data: tuple[Passes, ...]
    tokenizer: Tokenizer
    config: PretrainConfig
    """The run's config, with stages in place of the layout auto."""
    peaks: tuple[RankPeak, ...] = ()
    """The peak of each kind of rank; empty if activations cannot be counted."""
    why_no_peaks: str = ""
    """Why `peaks` is empty."""
    documents: PackedDocuments | None = None
    """Documents of the run's data in simulated steps, with --gpu or dynamic context parallelism; None if attention does
    not keep documents apart, or without data of documents at hand."""
    notes: tuple[str, ...] = ()
    """Lines about everything that depends on the size of the vocabulary."""

    @property
    def regrouping(self) -> RegroupingGain | None:
        """What dynamic context parallelism saves; None without it, or without data of documents at hand."""
        return self.documents if isinstance(self.documents, RegroupingGain) else None

    @property
    def memory(self) -> MemoryBytes:
        """Memory of the rank that needs most."""
        return max((entry.memory for entry in self.ranks), key=lambda memory: memory.total)


def dry_run(config: PretrainConfig, providers: Providers) -> DryRun:
    """Computes the properties of a run. Raises UserError if its tokenizer, model or data cannot be built or do not fit
    together, or if a checkpoint under --load has another model or schedule. The dry run may be on a machine without the
    checkpoint."""
    stand_in = planned_tokenizer(config)
    tokenizer = build_tokenizer(config.tokenizer) if stand_in is None else stand_in
    training, length = config.training, config.data.seq_length
    padded = vocabulary_rows(config, tokenizer)
    config, notes = resolve_auto_layout(config, padded)
    vocab_size = config.tokenizer.model_vocab_size(tokenizer.vocab_size)
    check_before_build(config, schedule_of_flags=providers.build_scheduler is None)
    check_vocabulary(config, (vocab_size, padded))
    if stand_in is None:
        check_data_of_run(config, tokenizer, reads_data=False)
    keep_data_contract(config, tokenizer)
    ranks = rank_memory(config, providers, tokenizer, padded)
    peaks, reason = peaks_or_reason(config, providers, tokenizer)
    return DryRun(
        parameters=parameters_of_model(entry.shard for entry in ranks),
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        ranks=tuple(ranks),
        tokens_per_step=training.global_batch_size * length,
        microbatches_per_step=BatchSchedule.from_config(training, config.grid.data, length).final_num_microbatches,
        flops_per_step=flops_of_samples(config, padded, training.global_batch_size),
        data=tuple(_passes_over_data(config)),
        tokenizer=tokenizer,
        config=config,
        peaks=peaks,
        why_no_peaks=reason,
        documents=_documents(config, tokenizer),
        notes=tuple(notes),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Data


def _passes_over_data(config: PretrainConfig) -> Iterator[Passes]:
    blend, per_split = blends(config)
    share = 1.0
    if per_split is not None:
        blend = per_split[0]
    elif config.data.split is not None:
        share = parse_split(config.data.split)[0]
    wanted, stages = tokens_to_train_on(config), stages_of_run(config)
    if stages is not None and wanted is not None:
        blend = blend_until(stages, wanted // config.data.seq_length)
    if blend is not None and not config.training.sft:
        yield from _passes_over(blend, share, wanted, config.data.data_contract is not None)


def _passes_over(blend: Blend, share: float, wanted: int | None, planned: bool) -> Iterator[Passes]:
    prefixes, weights = blend
    if planned and not all(is_url(prefix) or Path(f"{prefix}.idx").exists() for prefix in prefixes):
        return  # the lines of the data contract say so
    sizes = [int(IndexedDataset(prefix).sequence_lengths.sum() * share) for prefix in prefixes]
    parts = normalize(weights if weights is not None else sizes)
    for prefix, size, part in zip(prefixes, sizes, parts, strict=True):
        yield Passes(prefix, size, None if wanted is None or size == 0 else wanted * part / size)


def _documents(config: PretrainConfig, tokenizer: Tokenizer) -> PackedDocuments | None:
    blend, per_split = blends(config)
    blend = blend if per_split is None else per_split[0]
    is_asked = config.transformer.hybrid_context_parallel or config.hardware.gpu is not None
    is_at_hand = blend is not None and config.data.data_contract is None and not config.data.datasets_of_script
    if blend is None or not (packs_documents(config) and is_asked and is_at_hand):
        return None
    return packed_documents(config, blend, tokenizer)


def tokens_to_train_on(config: PretrainConfig) -> int | None:
    """Returns the number of tokens of the whole run, None if its length is not given."""
    training, length = config.training, config.data.seq_length
    if training.train_samples is not None:
        return training.train_samples * length
    return (
        BatchSchedule.from_config(training, config.grid.data, length).samples_of(training.train_iters) * length or None
    )
