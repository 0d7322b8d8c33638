"""Writes the data contract of a plan, and pins it to the tokenizer and data sets that were prepared for it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.data.preparation.manifest import get_manifest_path, read_manifest
from megatron.diagnosis.planning.plan import Plan
from megatron.diagnosis.planning.questions import tokenizer_ids
from megatron.diagnosis.planning.settings_of_run import tokenizer_type
from megatron.training.data.data_contract import DataContract, SourceClause, read_contract


def contract_of(plan: Plan) -> DataContract:
    """Returns the contract of a plan, without the digests of files, which do not exist yet."""
    spec = plan.specification
    assert spec.tokenizer is not None and spec.seq_length is not None and spec.tokens is not None
    return DataContract(
        tokenizer=spec.tokenizer.name,
        tokenizer_family=tokenizer_type(spec.tokenizer.name),
        tokenizer_ids=tokenizer_ids(spec),
        tokenizer_digest=None,
        vocabulary=plan.shape.vocab_size,
        deduplication=spec.deduplication,
        sources=tuple(SourceClause(source.name, source.prefix, source.ratio) for source in plan.sources),
        sequence_length=spec.seq_length,
        total_tokens=spec.tokens,
    )


def contract_lines(contract: DataContract) -> Iterator[str]:
    """Yields the clauses for a reader."""
    yield f"tokenizer        {contract.tokenizer} ({contract.tokenizer_family})"
    yield f"vocabulary       {contract.vocabulary:,} entries"
    yield f"deduplication    {contract.deduplication or 'not agreed'}"
    yield f"sequence length  {contract.sequence_length:,} tokens"
    yield f"total tokens     {contract.total_tokens:,}"
    for source in contract.sources:
        tokens = source.ratio * contract.total_tokens
        yield f"source           {source.name}: {source.ratio:.4g}, {tokens:,.0f} tokens, {source.prefix}"


def pin(path: Path) -> Iterator[str]:
    """Writes the digests of the prepared data sets and of their tokenizer into a contract. Yields a line for each.
    Raises UserError if a data set has no manifest, or if they were made with different tokenizers."""
    contract = read_contract(path)
    sources, digests = [], {}
    for source in contract.sources:
        manifest = read_manifest(source.prefix)
        if manifest is None:
            raise UserError(
                f"{get_manifest_path(source.prefix)}: no such file; prepare {source.name} with "
                f"tools/preprocess_data.py --output-prefix {source.prefix.rsplit('_', 2)[0]}, and pin again"
            )
        sources.append(dataclasses.replace(source, sha256=manifest.files["bin"].sha256))
        digests[manifest.tokenizer.digest] = source.name
        yield f"{source.name}: {manifest.tokens:,} tokens, SHA-256 {manifest.files['bin'].sha256[:12]}..."
    if len(digests) > 1:
        names = " and ".join(digests.values())
        raise UserError(f"{names} were made with different tokenizers; prepare them again with one")
    dataclasses.replace(contract, sources=tuple(sources), tokenizer_digest=next(iter(digests))).write(path)
    yield f"{path}: pinned"
