"""The data of a run from its flags: where it is, the config of its data sets, and losses of each of them in a blend."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.utils.url_keys import hide_keys
from megatron.data.datasets.blend_stages import BlendStage, last_blend, prefixes_of, read_stages_file
from megatron.data.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.data.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.data.datasets.sft_dataset import SFTDataset
from megatron.data.datasets.utils import Blend, get_blend_from_list, read_blend_file, read_blend_per_split_file
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.learned_turns import TURN_KINDS
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import Batch


def shared_fields(config: PretrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the fields of BlendedMegatronDatasetConfig, which the data of all models have, by name."""
    data = config.data
    blend, per_split = blends(config)
    stages = stages_of_run(config)
    if stages is not None and config.training.sft:
        raise UserError("--data-stages does not go with --sft; give the conversations by --data-path")
    return {
        "random_seed": config.seed,
        "sequence_length": data.seq_length,
        "blend": blend,
        "blend_stages": stages,
        "blend_per_split": per_split,
        "multiple_validation_sets": config.evaluation.multiple_validation_sets,
        "split": None if per_split is not None else data.split,
        "num_dataset_builder_threads": data.num_dataset_builder_threads,
        "path_to_cache": data.data_cache_path,
        "mmap_bin_files": data.mmap_bin_files,
        "mock": data.mock_data,
        "tokenizer": tokenizer,
        "num_ids": config.tokenizer.model_vocab_size(tokenizer.vocab_size),
        "mid_level_dataset_surplus": data.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": data.allow_ambiguous_pad_tokens,
    }


def masked_fields(config: PretrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the fields of MaskedWordPieceDatasetConfig, which the data of BERT and T5 have, by name."""
    return shared_fields(config, tokenizer) | {
        "masking_probability": config.data.mask_prob,
        "short_sequence_probability": config.data.short_seq_prob,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
    }


def prefixes_of_run(config: PretrainConfig) -> set[str]:
    """Returns the prefixes of all data sets that the flags name; none for made-up data."""
    blend, per_split = blends(config)
    found = {prefix for each in (blend, *(per_split or ())) if each is not None for prefix in each[0]}
    return found | set(prefixes_of(stages_of_run(config) or ()))


def stages_of_run(config: PretrainConfig) -> list[BlendStage] | None:
    """Returns the stages of --data-stages; None without them."""
    data = config.data
    return None if data.data_stages is None or data.mock_data else read_stages_file(data.data_stages)


def blends(config: PretrainConfig) -> tuple[Blend | None, list[Blend | None] | None]:
    """Returns the blend of the run and the blends of its splits. One of them is None; for mock data both are."""
    return (None, None) if config.data.mock_data else get_blend_and_blend_per_split(config.data)


def get_blend_and_blend_per_split(args: Any) -> tuple[Blend | None, list[Blend | None] | None]:
    """Returns the blend of --data-path or --data-args-path or the last one of --data-stages, and the blends of the
    splits' own flags. At least one of the two is None; both are without data. Raises UserError for a file that cannot
    be read."""
    if args.per_split_data_args_path is not None:
        return None, read_blend_per_split_file(args.per_split_data_args_path)
    if args.data_args_path is not None:
        return read_blend_file(args.data_args_path), None
    if getattr(args, "data_stages", None) is not None:
        return last_blend(read_stages_file(args.data_stages)), None
    if args.data_path is not None:
        return get_blend_from_list(args.data_path), None
    each = [get_blend_from_list(words) for words in (args.train_data_path, args.valid_data_path, args.test_data_path)]
    return None, each if any(each) else None


def gpt_dataset_config(config: PretrainConfig, tokenizer: Tokenizer) -> GPTDatasetConfig:
    """Returns the config of the run's data sets."""
    fields = shared_fields(config, tokenizer) | {
        "reset_position_ids": config.data.reset_position_ids,
        "reset_attention_mask": config.data.reset_attention_mask,
        "eod_mask_loss": config.data.eod_mask_loss,
        "create_attention_mask": False,
        "object_storage_cache_path": config.data.object_storage_cache_path,
        "full_validation": config.evaluation.full_validation,
    }
    if not config.data.fim_data:
        return GPTDatasetConfig(**fields)
    return GPTFIMDatasetConfig(**fields, **{name: getattr(config.data, name) for name in _FIM_FIELDS})


def gpt_dataset_kind(config: PretrainConfig) -> type[GPTDataset] | type[SFTDataset]:
    """Returns the class of a run's data sets."""
    if config.data.mock_data:
        return MockGPTDataset
    if config.training.sft:
        return SFTDataset
    return GPTFIMDataset if config.data.fim_data else GPTDataset


_FIM_FIELDS = [
    field.name
    for field in dataclasses.fields(GPTFIMDatasetConfig)
    if field.name.startswith("fim_") and field.name != "fim_extra_tokens"  # the marks of scripts that have no flags
]


SOURCE = " on source "
"""Separates the name of a loss from the name of the data set, in reports and in metrics.jsonl."""

MOST_SOURCES = 64
"""Largest number of data sets of a blend for which losses by source are logged."""


def source_names(config: PretrainConfig) -> tuple[str, ...]:
    """Returns the names of the data sets that training blends, in the order of the flags. A name is the file name of
    the prefix, or the whole prefix if file names are equal. A prefix that is given again has its count behind the name.
    Empty for a single data set and for made-up data."""
    prefixes = _prefixes(config)
    if len(prefixes) < 2:
        return ()
    short = {prefix: Path(prefix).name for prefix in prefixes}
    names = short if len(set(short.values())) == len(short) else {prefix: prefix for prefix in prefixes}
    return tuple(names[prefix] + suffix for prefix, suffix in zip(prefixes, _suffixes(prefixes), strict=True))


def source_keys(config: PretrainConfig) -> tuple[str, ...]:
    """Returns texts that identify these data sets in a checkpoint, also a single one: the prefix, with its count if it
    is given again."""
    prefixes = _prefixes(config)
    return tuple(prefix + suffix for prefix, suffix in zip(prefixes, _suffixes(prefixes), strict=True))


def _prefixes(config: PretrainConfig) -> list[str]:
    data = config.data
    if data.mock_data or not data.sources():
        return []
    if data.data_stages is not None:
        return [hide_keys(prefix) for prefix in prefixes_of(read_stages_file(data.data_stages))]
    blend, per_split = blends(config)
    found = per_split[0] if per_split is not None else blend
    return [] if found is None else [hide_keys(prefix) for prefix in found[0]]


def _suffixes(prefixes: list[str]) -> list[str]:
    counts = [prefixes[: place + 1].count(prefix) for place, prefix in enumerate(prefixes)]
    return [f" ({count})" if count > 1 else "" for count in counts]


def loss_names(config: PretrainConfig) -> tuple[str, ...]:
    """Returns what `Batch.sources` counts: the data sets of a blend, or for one file of conversations the kinds of
    turns. Empty for other data."""
    names = source_names(config)
    is_one_file = config.training.sft and not config.data.mock_data and len(_prefixes(config)) == 1
    return names or (TURN_KINDS if is_one_file else ())


def with_source_losses(loss_func: Callable[..., Any], batch: Batch, names: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a loss function whose report also has the sum of losses and the number of tokens of each source, as
    `lm loss on source NAME`. The loss stays the same."""
    if batch.sources is None or not 0 < len(names) <= MOST_SOURCES:
        return loss_func
    sources, mask = batch.sources.reshape(-1), batch.loss_mask.reshape(-1)

    def with_sources(losses: Tensor, *arguments: Any, **keywords: Any) -> Any:
        *result, report = loss_func(losses, *arguments, **keywords)
        name = next(iter(report), None)
        if name is None or losses.numel() != mask.numel():
            return *result, report
        found = _by_source(losses.detach().reshape(-1), mask, sources, len(names))
        return *result, report | {f"{name}{SOURCE}{each}": found[number] for number, each in enumerate(names)}

    return with_sources


def _by_source(losses: Tensor, mask: Tensor, sources: Tensor, count: int) -> Tensor:
    """Returns sums of losses and numbers of tokens by source, [sources, 2]. A non-finite loss affects only the sum of
    its own source."""
    kind = torch.promote_types(losses.dtype, torch.float32)
    of_source = sources == torch.arange(count, device=sources.device)[:, None]  # [sources, tokens]
    weighed = torch.where(of_source, losses.to(kind) * mask.to(kind), 0.0)
    return torch.stack([weighed.sum(1), (of_source * mask.to(kind)).sum(1)], dim=1)
