"""Turns .jsonl (also .gz, .xz, .zst), Parquet, Arrow and text files into a dataset of token ids (.bin and .idx).

python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --tokenizer-type GPT2BPETokenizer \
    --vocab-file vocab.json --merge-file merges.txt --append-eod

writes corpus_text_document.bin, .idx and .manifest.json. docs/data.md describes the input and the files.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from megatron.interrupts import exit_quietly, run_main, tells_mistakes, warn

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.data.preparation.config import PreparationConfig
from megatron.data.preparation.manifest import DataManifest
from megatron.data.preparation.prepare import PreparedData, prepare
from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.training.config.tool_flags import Section, read_tool_flags

USAGE = "python tools/preprocess_data.py --input FILE ... --output-prefix PREFIX [flags]"
ABOUT = (
    "Turn .jsonl, Parquet, Arrow and text files into a data set of token ids: PREFIX_KEY_document.bin and .idx "
    "(PREFIX_KEY_sentence with --split-sentences), and a manifest of what they were made of. Each process reads its "
    "own parts of the input and writes its own files; the result is the same for any number of processes."
)
SECTIONS = (
    Section("input and output", PreparationConfig),
    Section("tokenizer", TokenizerConfig),
)
RENAMED = {"--vocab": "--vocab-file"}


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit code."""
    console = Console()
    try:
        words = sys.argv[1:] if argv is None else argv
        preparation, tokenizer_config = read_tool_flags(words, SECTIONS, USAGE, ABOUT, RENAMED)
        if not (preparation.append_eod or preparation.split_sentences):
            warn("without --append-eod no token marks the end of a document, and the next document follows directly")
        if preparation.partitions > 1 and not preparation.keep_sequential_samples:
            warn(
                f"--partitions {preparation.partitions}: documents get another order than in the input "
                "(--keep-sequential-samples keeps it)"
            )
        tokenizer = build_tokenizer(tokenizer_config)
        if tokenizer.speed_note is not None:
            warn(f"{tokenizer.type_name}: slow, by the tokenizers library, since {tokenizer.speed_note}")
        prepared = prepare(preparation, tokenizer, console, warn)
    except KeyboardInterrupt:
        print(
            "interrupted; no data set was written; the same command continues from the finished part", file=sys.stderr
        )
        return 130
    _report(prepared)
    return 0


def _report(prepared: PreparedData) -> None:
    for prefix, manifest in zip(prepared.prefixes, prepared.manifests, strict=True):
        print(
            f"{prefix}: {manifest.documents:,} documents, {manifest.sequences:,} sequences, {manifest.tokens:,} tokens "
            f"({manifest.dtype})"
        )
        if manifest.documents_with_special_literals:
            _report_literals(manifest)
        if not manifest.tokens:
            warn(f"{prefix}: no tokens, so nothing can be trained on it")
        elif manifest.sentences is not None and manifest.sequences <= manifest.documents:
            warn(
                f"{prefix}: no document has two sentences, of which BERT makes pairs; sentences end with marks such "
                "as . ? and !"
            )
    first = prepared.manifests[0]
    if first.blank_lines:
        print(f"blank lines, passed over: {first.blank_lines:,}")
    if first.dropped_lines:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in first.dropped_lines.items())
        print(f"dropped lines: {sum(first.dropped_lines.values()):,} ({kinds}); the first:")
        for example in prepared.dropped_examples:
            print(f"  {example}")
    megabytes = sum(file["bytes"] for file in first.inputs) / 1e6
    print(f"{megabytes:,.1f} MB in {prepared.seconds:.1f} s, {megabytes / prepared.seconds:.1f} MB/s")


def _report_literals(manifest: DataManifest) -> None:
    how = "that token" if manifest.special_literals_matched else "ordinary text"
    print(f"  {manifest.documents_with_special_literals:,} of the documents spell out a special token, taken as {how}")


if __name__ == "__main__":
    run_main(main)
