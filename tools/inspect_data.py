"""Verifies datasets (.bin, .idx and manifest) and shows the text of some of their documents.

python tools/inspect_data.py --data-path corpus_text_document --documents 3 --tokenizer-type GPT2BPETokenizer \
    --vocab-file vocab.json --merge-file merges.txt

python tools/inspect_data.py --data-path talks.jsonl --documents 3 --tokenizer-type SFTTokenizer \
    --tokenizer-model FOLDER

With an SFTTokenizer a file of conversations is verified, and what is learned is shown in colour.

The exit code is 1 if a dataset has a fault. docs/data.md describes the faults.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

import numpy as np
from rich.console import Console
from rich.text import Text

from megatron.core.exceptions import UserError
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.preparation.inspection import decoded_documents, find_faults, inspected_conversations
from megatron.data.preparation.manifest import read_manifest
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.sft import SFTTokenizer
from megatron.training.config.tool_flags import Section, read_tool_flags

USAGE = "python tools/inspect_data.py --data-path PREFIX ... [flags]"
ABOUT = (
    "Verify data sets: index, sizes, content against the manifest, ids against the vocabulary, and the tokenizer, if "
    "its flags are given. Show the text of documents."
)


@dataclass(kw_only=True, frozen=True)
class InspectionConfig:
    """What to verify and to show."""

    data_path: list[str] | None = None
    """Prefixes of the data sets, without .bin; with an SFTTokenizer, files of conversations. Required."""

    documents: int = 0
    """Number of documents whose text is shown. Needs the tokenizer's flags."""

    first_document: int = 0
    """Number of the first document that is shown, from 0."""

    tokens: int = 200
    """Largest number of tokens that are shown of a document."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value."""
        if not self.data_path:
            yield "{data_path:name}: missing; give the path of a data set, without .bin"
        elif not all(self.data_path):
            yield '{data_path:name} "" is an empty path, perhaps from a shell variable that is not set; give a path'
        for field, least in (("documents", 0), ("first_document", 0), ("tokens", 1)):
            if getattr(self, field) < least:
                yield f"{{{field}}}: must be at least {least}"


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    named = any(word.startswith(("--tokenizer", "--vocab-")) for word in words)
    checks = TokenizerConfig.validate if named else _no_problems
    sections = (Section("data", InspectionConfig), Section("tokenizer", TokenizerConfig, checks))
    config, tokenizer_config = read_tool_flags(words, sections, USAGE, ABOUT)
    tokenizer = build_tokenizer(tokenizer_config) if named else None
    if config.documents and tokenizer is None:
        raise UserError("--documents: needs the tokenizer; give --tokenizer-type and its files")
    faults = [fault for prefix in config.data_path for fault in _inspect(prefix, config, tokenizer)]
    return 1 if faults else 0


def _no_problems(_: TokenizerConfig) -> tuple[str, ...]:
    """Without a tokenizer's flags there is no tokenizer."""
    return ()


def _inspect(prefix: str, config: InspectionConfig, tokenizer: Tokenizer | None) -> list[str]:
    """Verifies a dataset and prints the results. Returns its faults."""
    if isinstance(tokenizer, SFTTokenizer):
        return _inspect_conversations(prefix, config, tokenizer)
    faults = list(dict.fromkeys(find_faults(prefix, tokenizer)))
    for fault in faults:
        print(f"FAULT: {fault}")
    if not faults:
        _print_summary(prefix, tokenizer)
    if config.documents:
        try:
            assert tokenizer is not None
            shown = decoded_documents(prefix, tokenizer, config.first_document, config.documents, config.tokens)
            for title, text in shown:
                print(f"--- {title}\n{text}")
        except UserError:
            if not faults:
                raise
    return faults


def _inspect_conversations(path: str, config: InspectionConfig, tokenizer: SFTTokenizer) -> list[str]:
    """Verifies a file of conversations and prints the results, with learned parts in green, or in angle quotes where
    there are no colours. Returns its faults."""
    console = Console(soft_wrap=True, highlight=False)
    faults, count, tokens, learned = [], 0, 0, 0
    last = config.first_document + config.documents
    for number, talk in enumerate(inspected_conversations(path, tokenizer, config.tokens)):
        if talk.fault is not None:
            faults.append(talk.fault)
            print(f"FAULT: {talk.fault}")
            continue
        count, tokens, learned = count + 1, tokens + talk.tokens, learned + talk.learned
        if config.first_document <= number < last:
            cut = f", the first {config.tokens}" if talk.tokens > config.tokens else ""
            print(f"--- {talk.place}: {talk.tokens} tokens, {talk.learned} of them learned{cut}", flush=True)
            styled = [
                (text, "bold green" if learns else "") if console.is_terminal else f"«{text}»" if learns else text
                for text, learns in talk.parts
            ]
            console.print(Text.assemble(*styled))
    if not count and not faults:
        raise UserError(f"--data-path {path}: contains no conversations")
    if config.documents and config.first_document >= count + len(faults):
        raise UserError(f"--first-document {config.first_document}: {path} has rows 0 to {count + len(faults) - 1}")
    print(f"{path}: {count:,} conversations, {tokens:,} tokens, {learned:,} of them learned; {len(faults)} faults")
    return faults


def _print_summary(prefix: str, tokenizer: Tokenizer | None) -> None:
    dataset = IndexedDataset(prefix)
    lengths = dataset.sequence_lengths
    print(
        f"{prefix}: {len(dataset.document_indices) - 1:,} documents, {len(dataset):,} sequences, "
        f"{int(lengths.sum(dtype=np.int64)):,} tokens ({dataset.dtype.name}); no fault found"
    )
    manifest = read_manifest(prefix)
    if manifest is None:
        print("  no manifest: content and tokenizer cannot be verified" + ("" if tokenizer else ", nor the ids"))
    else:
        made_by = manifest.tokenizer
        print(f"  made with a {made_by.type} of {made_by.vocab_size} ids, end of document {made_by.eod}")


if __name__ == "__main__":
    run_main(main)
