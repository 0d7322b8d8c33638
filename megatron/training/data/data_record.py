"""What checkpoints store about a run's data, and a resumed run compares: digests of the data sets, and what determines
the order of the training samples.

The number of epochs that a run needs is shuffled as a whole, so a run of another length may read other samples at the
same position.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.utils.files import sha256_of_file
from megatron.core.utils.url_keys import hide_keys
from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.staged_blend import StagedBlend
from megatron.data.preparation.manifest import read_manifest
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.sources import prefixes_of_run

_LOADER = "--dataloader-type"
_STAGE = "stage from sample "
_OF_BLEND = "% of the samples"
_MOST_NAMED = 3


def order_of(dataset: Any, dataloader_type: str) -> dict[str, str]:
    """Returns words about each data set of the training data, by prefix, and about each stage. They change if the order
    of the first samples changes, except for changes of the files and of flags that are compared elsewhere. Empty for a
    data set of a script's own kind."""
    if isinstance(dataset, StagedBlend):
        stages = dataset.order.stages
        found = {f"{_STAGE}{stage.first_sample}": _blend(stage.prefixes, stage.weights) for stage in stages}
    elif isinstance(dataset, BlendedDataset):
        lengths = [len(each) for each in dataset.datasets]
        weights = dataset.weights or [length / sum(lengths) for length in lengths]
        found = {}
        for number, (each, weight) in enumerate(zip(dataset.datasets, weights, strict=True)):
            name = _name(each) if _name(each) not in found else f"{_name(each)} (number {number + 1})"
            found[name] = f"{100 * weight:.6g}{_OF_BLEND}{_epochs(each, ', ')}"
    elif isinstance(dataset, MegatronDataset):
        found = {_name(dataset): _epochs(dataset)}
    else:
        return {}
    is_cyclic = dataloader_type == "cyclic"
    return found | {_LOADER: f"cyclic, {len(dataset)} samples a pass" if is_cyclic else dataloader_type}


def order_differences(now: Mapping[str, str], before: Mapping[str, str], consumed: int) -> Iterator[str]:
    """Yields a sentence if the order of the samples in this run is not that of the checkpoint. `consumed` is the number
    of samples that the checkpoint has trained on; without any, and for stages after them, the order may change."""
    if not (consumed and now and before):
        return
    names = [name for name in dict.fromkeys((*before, *now)) if now.get(name) != before.get(name)]
    names = [name for name in names if not name.startswith(_STAGE) or int(name.removeprefix(_STAGE)) < consumed]
    if not names:
        return
    changes = [f"{name}: {now.get(name, 'none')} (was {before.get(name, 'none')})" for name in names[:_MOST_NAMED]]
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    if any(_OF_BLEND in now.get(name, "") + before.get(name, "") for name in names):
        more += "; to change weights in the course of a run, without samples that come again, give --data-stages"
    yield (
        f"WARNING: the order of the training samples is not that of the checkpoint, so some of the {consumed} samples "
        f"that it has trained on come again, and others are left out: {'; '.join(changes)}{more}"
    )


def _name(dataset: MegatronDataset) -> str:
    return hide_keys(dataset.dataset_path or "made-up data")


def _epochs(dataset: MegatronDataset, before: str = "") -> str:
    return "" if dataset.shuffled_together is None else before + dataset.shuffled_together


def _blend(prefixes: tuple[str, ...], weights: tuple[float, ...]) -> str:
    return ", ".join(
        f"{100 * weight:.6g}% {hide_keys(prefix)}" for prefix, weight in zip(prefixes, weights, strict=True)
    )


_HASHED_BYTES = 256 << 20
"""Largest file of conversations, in bytes, whose digest covers its content. The digest of a larger file covers only its
size."""


def data_digests(config: PretrainConfig) -> dict[str, str]:
    """Returns a digest of each data set that the flags name, by prefix; none for made-up data.

    It is made from the digests in the manifest. Without a manifest it covers token type, lengths, documents, and 64
    blocks of the tokens.
    """
    return {hide_keys(prefix): _digest(prefix) for prefix in sorted(prefixes_of_run(config))}


def _digest(prefix: str) -> str:
    manifest = read_manifest(prefix)
    if manifest is not None:
        content = " ".join(f"{suffix} {record.sha256}" for suffix, record in sorted(manifest.files.items()))
        return hashlib.sha256(content.encode()).hexdigest()
    if IndexedDataset.exists(prefix):
        return IndexedDataset(prefix).content_digest(with_documents=True)
    path = Path(prefix)
    if not path.is_file():
        return "unknown"
    size = path.stat().st_size
    return sha256_of_file(path) if size <= _HASHED_BYTES else f"{size} bytes"


def data_differences(now: Mapping[str, str], before: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence for each data set of this run whose content has changed since the checkpoint was saved, is new,
    or had another path."""
    paths = {digest: prefix for prefix, digest in before.items()}
    for prefix, digest in now.items():
        if before.get(prefix) == digest:
            continue
        if digest in paths:
            yield f"data {prefix}: has the content of {paths[digest]} when the checkpoint was saved"
        elif prefix in before:
            yield f"data {prefix}: its content has changed since the checkpoint was saved"
        else:
            yield f"data {prefix}: new content, which the run that saved the checkpoint did not have"
