"""--data-contract: what a plan promised about data and tokenizer, and whether a run keeps it.

tools/plan.py writes the file. A clause that a run breaks ends it before the first step, with the name of the clause.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json, read_regular_file, write_atomically
from megatron.core.utils.json_schema import Integer, ListOf, Nullable, Number, Record, Text
from megatron.data.datasets.object_store import is_url
from megatron.data.datasets.utils import normalize
from megatron.data.preparation.manifest import DataManifest, get_manifest_path, read_manifest
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.null import NullTokenizer
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.sources import blends

VERSION = 1
_RATIO_MARGIN = 0.0005


@dataclass(frozen=True)
class SourceClause:
    """A source of the training data."""

    name: str
    prefix: str
    """Prefix of its data set. A run may have it in another folder."""
    ratio: float
    """Share of the tokens, from 0 to 1."""
    sha256: str | None = None
    """SHA-256 of its .bin file; None: not pinned yet (tools/plan.py --pin)."""


@dataclass(frozen=True)
class DataContract:
    """The clauses of a contract."""

    tokenizer: str
    """Its name in the plan."""
    tokenizer_family: str
    """--tokenizer-type."""
    tokenizer_ids: int | None
    """Number of its ids; None: any."""
    tokenizer_digest: str | None
    """Digest of its content; None: not pinned yet."""
    vocabulary: int
    """Entries of the model's vocabulary, without padding."""
    deduplication: str | None
    """Method by which the sources were deduplicated; None: not agreed."""
    sources: tuple[SourceClause, ...]
    sequence_length: int
    total_tokens: int

    def write(self, path: str | Path) -> None:
        """Writes the contract in one step."""
        write_atomically(path, json.dumps({"version": VERSION} | asdict(self), indent=2, ensure_ascii=False) + "\n")


def read_contract(path: str | Path) -> DataContract:
    """Reads a contract. Raises UserError that names the file if it is missing or no contract."""
    try:
        content = parse_json(read_regular_file(path).decode())
        if content.pop("version") != VERSION:
            raise UserError(f"--data-contract {path}: made by another release; make the plan again")
        problem = _CONTRACT.problem(content)
        if problem is not None:
            raise ValueError(problem)
        sources = tuple(SourceClause(**clause) for clause in content.pop("sources"))
        contract = DataContract(sources=sources, **content)
    except OSError as error:
        raise UserError(f"--data-contract {path}: {error.strerror}; tools/plan.py writes it") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--data-contract {path}: no contract of tools/plan.py: {error}; make the plan again") from None
    if not contract.sources:
        raise UserError(f"--data-contract {path}: no contract of tools/plan.py: it has no sources; make the plan again")
    return contract


_SOURCE = Record({"name": Text(), "prefix": Text(), "ratio": Number(), "sha256": Nullable(Text())})
_CONTRACT = Record(
    {
        "tokenizer": Text(),
        "tokenizer_family": Text(),
        "tokenizer_ids": Nullable(Integer()),
        "tokenizer_digest": Nullable(Text()),
        "vocabulary": Integer(),
        "deduplication": Nullable(Text()),
        "sequence_length": Integer(),
        "total_tokens": Integer(),
        "sources": ListOf(_SOURCE),
    }
)


# ---------------------------------------------------------------------------------------------------------------------
# A run and its contract


@dataclass(frozen=True)
class Clause:
    """What a run does about a clause."""

    name: str
    text: str
    kept: bool | None
    """None: it cannot be told yet."""


def planned_tokenizer(config: PretrainConfig) -> NullTokenizer | None:
    """Returns a tokenizer that stands in, in a dry run of a plan, for one whose files do not exist yet: it has as many
    ids as the model's vocabulary. None if the run's own can be built."""
    tokenizer = config.tokenizer
    if not (config.training.dry_run and config.data.data_contract and tokenizer.vocab_size):
        return None
    return None if not missing_tokenizer_files(tokenizer) else NullTokenizer(tokenizer.vocab_size - 1)


def missing_tokenizer_files(tokenizer: TokenizerConfig) -> list[str]:
    """Returns the files of a tokenizer that do not exist."""
    files = [getattr(tokenizer, field) for field in tokenizer.files]
    return [file for file in files if file is not None and not Path(file).exists()]


def keep_data_contract(config: PretrainConfig, tokenizer: Tokenizer) -> None:
    """Prints which clauses of --data-contract the run keeps. Raises UserError, the same on all ranks, with all clauses
    that it breaks, one a line. Does nothing without the flag. Collective."""
    if config.data.data_contract is not None:
        RankCoordinator().run_on_first(lambda: _keep(config, tokenizer))


def _keep(config: PretrainConfig, tokenizer: Tokenizer) -> None:
    path = config.data.data_contract
    assert path is not None
    if config.training.dry_run and not Path(path).is_file():
        print(f"data contract {path}: not here, so no clause is checked")
        return
    contract = read_contract(path)
    if config.data.mock_data:
        print(f"data contract {path}: not checked, because --mock-data replaces the data that it is about")
        return
    clauses = list(clauses_of(contract, config, tokenizer))
    broken = [clause for clause in clauses if clause.kept is False]
    if broken:
        raise UserError("\n".join(f"data contract {path}, clause {clause.name}: {clause.text}" for clause in broken))
    print(f"data contract {path}:", flush=True)
    for clause in clauses:
        print(f"  {'kept' if clause.kept else 'open'}  {clause.name}: {clause.text}", flush=True)


def clauses_of(contract: DataContract, config: PretrainConfig, tokenizer: Tokenizer) -> Iterator[Clause]:
    """Yields all clauses, and whether a run keeps them."""
    yield _tokenizer(contract, config, tokenizer)
    entries = config.tokenizer.model_vocab_size(tokenizer.vocab_size)
    yield _compared("vocabulary", contract.vocabulary, entries, "entries")
    yield _compared("sequence length", contract.sequence_length, config.data.seq_length, "tokens")
    yield _total_tokens(contract, config)
    yield from _sources(contract, config)


def _compared(name: str, planned: int, found: int, what: str) -> Clause:
    if planned == found:
        return Clause(name, f"{found:,} {what}", True)
    return Clause(name, f"the plan has {planned:,} {what}, the run {found:,}; use {planned}", False)


def _tokenizer(contract: DataContract, config: PretrainConfig, tokenizer: Tokenizer) -> Clause:
    planned = f"{contract.tokenizer_family} {contract.tokenizer}"
    family, name = config.tokenizer.family, "tokenizer"
    if family != contract.tokenizer_family:
        return Clause(name, f"the plan has the {planned}, the run a {family}; use the plan's", False)
    if planned_tokenizer(config) is not None:
        return Clause(name, f"{planned}: {', '.join(missing_tokenizer_files(config.tokenizer))} not there yet", None)
    if contract.tokenizer_ids is not None and contract.tokenizer_ids != tokenizer.vocab_size:
        ids = f"{contract.tokenizer_ids:,} ids, the run's has {tokenizer.vocab_size:,}"
        return Clause(name, f"the plan's {planned} has {ids}; use the plan's", False)
    if contract.tokenizer_digest not in (None, tokenizer.digest):
        return Clause(name, f"the {planned} is not the one that was pinned: other content; use the pinned files", False)
    pinned = "" if contract.tokenizer_digest else " (content not pinned)"
    return Clause(name, f"{planned}, {tokenizer.vocab_size:,} ids{pinned}", True)


def _total_tokens(contract: DataContract, config: PretrainConfig) -> Clause:
    training, length = config.training, config.data.seq_length
    samples = training.train_samples
    if samples is None:
        samples = BatchSchedule.from_config(training, config.grid.data, length).samples_of(training.train_iters)
    found, step = samples * length, training.global_batch_size * length
    if abs(found - contract.total_tokens) < step:
        return Clause("total tokens", f"{found:,}", True)
    steps = -(-contract.total_tokens // step)
    return Clause(
        "total tokens",
        f"the plan has {contract.total_tokens:,}, the run {found:,}; use --train-iters {steps} (--exit-interval ends a "
        "trial run earlier)",
        False,
    )


def _sources(contract: DataContract, config: PretrainConfig) -> Iterator[Clause]:
    if config.data.data_stages is not None:
        yield Clause("data mix", "--data-stages changes the plan's ratios during the run; give --data-path", False)
        return
    blend, per_split = blends(config)
    if per_split is not None:
        blend = per_split[0]
    prefixes: Sequence[str] = () if blend is None else blend[0]
    weights = None if blend is None else blend[1]
    by_name = {Path(prefix).name: prefix for prefix in prefixes}
    planned = {Path(source.prefix).name: source for source in contract.sources}
    for name in by_name.keys() - planned.keys():
        near = ", ".join(planned)
        yield Clause("data mix", f"{by_name[name]} is no source of the plan; its data sets are {near}", False)
    if weights is None and len(prefixes) > 1:
        yield Clause("data mix", "the run gives its data sets no weights; give each the plan's ratio", False)
        weights = [planned[Path(p).name].ratio if Path(p).name in planned else 0.0 for p in prefixes]
    ratios = dict(zip(prefixes, normalize(weights) if weights else [1.0] * len(prefixes), strict=True))
    for name, source in planned.items():
        if name not in by_name:
            yield Clause(
                f"source {source.name}", f"the run does not read {source.prefix}; add it to --data-path", False
            )
            continue
        yield _ratio(source, float(ratios[by_name[name]]))
        yield from _data_set(contract, source, by_name[name], config.training.dry_run)


def _ratio(source: SourceClause, found: float) -> Clause:
    name = f"ratio of {source.name}"
    if abs(found - source.ratio) <= _RATIO_MARGIN:
        return Clause(name, f"{found:.4g}", True)
    return Clause(name, f"the plan has {source.ratio:.4g}, the run {found:.4g}; use {source.ratio:.6g}", False)


def _data_set(contract: DataContract, source: SourceClause, prefix: str, dry_run: bool) -> Iterator[Clause]:
    """Yields the clauses about the files of a source."""
    file, dedup = f"file of {source.name}", f"deduplication of {source.name}"
    manifest = read_manifest(prefix)
    if manifest is None:
        there = is_url(prefix) or Path(f"{prefix}.bin").exists()
        reason = "no manifest, so nothing is known about it" if there or not dry_run else "not there yet"
        unknown = False if source.sha256 else None
        yield Clause(file, f"{prefix}: {reason}" + ("; the pinned data set has one" if source.sha256 else ""), unknown)
        if contract.deduplication not in (None, "none"):
            yield Clause(dedup, f"{contract.deduplication}; {prefix}: {reason}", None)
        return
    yield _file(file, source, prefix, manifest)
    if contract.deduplication is not None:
        yield _deduplication(dedup, contract.deduplication, prefix, manifest)


def _file(name: str, source: SourceClause, prefix: str, manifest: DataManifest) -> Clause:
    found = manifest.files["bin"].sha256
    if source.sha256 not in (None, found):
        planned = f"SHA-256 {source.sha256[:12]}... was pinned"
        return Clause(name, f"{planned}, {get_manifest_path(prefix)} has {found[:12]}...; use the pinned data", False)
    pinned = "pinned" if source.sha256 else "not pinned"
    return Clause(name, f"{prefix}, {manifest.tokens:,} tokens, {pinned}", True)


def _deduplication(name: str, planned: str, prefix: str, manifest: DataManifest) -> Clause:
    found = manifest.deduplication or "none"
    if found == planned or (found == "both" and planned in ("exact-match", "minhash")):
        return Clause(name, found, True)
    return Clause(
        name,
        f"the plan has {planned}, {get_manifest_path(prefix)} records {found}; prepare deduplicated text with "
        f"tools/preprocess_data.py --deduplication {planned}",
        False,
    )
