"""Digests of a run's data, which its checkpoints store and a resumed run compares."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.core.utils.files import sha256_of_file
from megatron.core.utils.url_keys import hide_keys
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.preparation.manifest import read_manifest
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.sources import prefixes_of_run

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
