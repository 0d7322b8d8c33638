"""Merges data sets (.bin and .idx) into one, with a manifest if all of them have manifests."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.core.utils.files import sha256_of_file
from megatron.data.datasets.index_format import get_bin_path, get_idx_path
from megatron.data.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.data.preparation.checks import check_file
from megatron.data.preparation.manifest import DataManifest, FileRecord, get_manifest_path, read_manifest


def find_prefixes(folder: str) -> tuple[str, ...]:
    """Returns the prefixes of the data sets in a folder, in the order of their names.

    Raises UserError if the folder contains none, or if a .bin or .idx file lacks the other one.
    """
    if not folder:
        raise UserError('--input "" is an empty path, perhaps from a shell variable that is not set; give a folder')
    try:
        names = [path.name for path in Path(folder).iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise UserError(f"--input {folder}: {error.strerror}") from None
    bins = {name.removesuffix(".bin") for name in names if name.endswith(".bin")}
    indices = {name.removesuffix(".idx") for name in names if name.endswith(".idx")}
    for stem in sorted(bins ^ indices):
        present, missing = (".bin", ".idx") if stem in bins else (".idx", ".bin")
        raise UserError(f"--input {folder}: {stem}{present} has no {stem}{missing} beside it")
    if not bins:
        raise UserError(f"--input {folder}: contains no .bin and .idx files")
    return tuple(str(Path(folder) / stem) for stem in sorted(bins))


def merge_datasets(
    prefixes: Sequence[str], output: str, warn: Callable[[str], None], multimodal: bool = False
) -> DataManifest | None:
    """Writes the documents of all data sets, one data set after the other, to `output`.bin and .idx.

    Returns the manifest that it writes beside them. Without manifests of all data sets it writes none and warns. Warns
    if it replaces a data set, and if `output` lies beside an input, where a later merge of the folder counts it twice.
    Raises UserError if a data set is damaged, if their tokenizers or token types differ, if `output` names no file, or
    if it is one of the inputs under any path.
    """
    if not output or output.endswith("/"):
        raise UserError(f'--output-prefix "{output}": no name of a data set; give its path without .bin')
    written = {Path(name(output)).resolve() for name in (get_bin_path, get_idx_path)}
    if any(Path(name(prefix)).resolve() in written for prefix in prefixes for name in (get_bin_path, get_idx_path)):
        raise UserError(f"--output-prefix {output}: one of the inputs; give another name")
    manifests = [read_manifest(prefix) for prefix in prefixes]
    lacking = [prefix for prefix, manifest in zip(prefixes, manifests, strict=True) if manifest is None]
    known = [manifest for manifest in manifests if manifest is not None]
    _check_alike(prefixes, manifests)
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        for suffix, record in () if manifest is None else manifest.files.items():
            check_file(Path(f"{prefix}.{suffix}"), record.bytes, record.sha256, get_manifest_path(prefix), 1 << 62)
    folder = Path(get_bin_path(output)).resolve().parent
    if any(Path(get_bin_path(prefix)).absolute().parent.resolve() == folder for prefix in prefixes):
        warn(f"{output}: in the folder of its inputs; a later merge of that folder counts these documents twice")
    for path in (get_bin_path(output), get_idx_path(output)):
        if Path(path).exists():
            warn(f"{path}: exists and will be replaced")
    Path(get_manifest_path(output)).unlink(missing_ok=True)
    Path(get_idx_path(output)).unlink(missing_ok=True)
    dtype = IndexedDataset(prefixes[0], multimodal=multimodal).dtype.type
    try:
        with IndexedDatasetBuilder(get_bin_path(output), dtype, multimodal) as builder:
            for prefix in prefixes:
                builder.add_index(prefix)
            builder.finalize(get_idx_path(output))
    except OSError as error:
        raise UserError(f"--output-prefix {output}: {error.filename or output}: {error.strerror}") from None
    if lacking:
        warn(f"{output}: without a manifest, because {lacking[0]} has none; a run will check all ids instead")
        return None
    manifest = _joined(known, output)
    manifest.write(get_manifest_path(output))
    return manifest


def _check_alike(prefixes: Sequence[str], manifests: Sequence[DataManifest | None]) -> None:
    known = [(prefix, manifest) for prefix, manifest in zip(prefixes, manifests, strict=True) if manifest is not None]
    for prefix, manifest in known[1:]:
        first_prefix, first = known[0]
        for what, mine, other in (
            ("tokenizer", first.tokenizer, manifest.tokenizer),
            ("level", first.level, manifest.level),
            ("--append-eod", first.append_eod, manifest.append_eod),
            ("--deduplication", first.deduplication, manifest.deduplication),
        ):
            if mine != other:
                raise UserError(
                    f"{prefix} and {first_prefix} differ in {what}: {other} and {mine}; such data sets cannot be merged"
                )


def _joined(manifests: Sequence[DataManifest], output: str) -> DataManifest:
    dropped: Counter[str] = Counter()
    for manifest in manifests:
        dropped.update(manifest.dropped_lines)
    counts = ("documents", "sequences", "tokens", "documents_with_special_literals", "lines", "blank_lines")
    totals = {name: sum(getattr(manifest, name) for manifest in manifests) for name in counts}
    files = {suffix: Path(f"{output}.{suffix}") for suffix in ("bin", "idx")}
    return dataclasses.replace(
        manifests[0],
        **totals,
        key=", ".join(dict.fromkeys(manifest.key for manifest in manifests)),
        dropped_lines=dict(dropped),
        cleaning=tuple(step for manifest in manifests for step in manifest.cleaning),
        inputs=tuple(file for manifest in manifests for file in manifest.inputs),
        files={suffix: FileRecord(path.stat().st_size, sha256_of_file(path)) for suffix, path in files.items()},
    )
