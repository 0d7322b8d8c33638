"""Losses of each data set of a blend (its "sources"), in addition to the loss of the whole batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.utils.url_keys import hide_keys
from megatron.data.datasets.blend_stages import prefixes_of, read_stages_file
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import Batch
from megatron.training.data.sources import blends

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
