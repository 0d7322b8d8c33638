"""Trains a byte-level BPE tokenizer on the text of .jsonl files.

python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 32768 --output-dir my_tokenizer

This writes vocab.json and merges.txt for --tokenizer-type GPT2BPETokenizer, and tokenizer.json and
tokenizer_config.json for HuggingFaceTokenizer and other programs. The same input gives the same files.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.exceptions import UserError
from megatron.core.utils.files import write_atomically
from megatron.training.config.tool_flags import Section, read_tool_flags
from megatron.training.data_preparation.blocks import InputFile, LineReader, find_inputs
from megatron.training.data_preparation.records import BadLine, texts_of_line
from megatron.training.tokenizer.base import load_library
from megatron.training.tokenizer.gpt2_bpe import END_OF_TEXT

USAGE = "python tools/train_tokenizer.py --input FILE ... --vocab-size N --output-dir DIR [flags]"
ABOUT = (
    "Trains a byte-level BPE tokenizer, as GPT-2 has, on the text of .jsonl files. The same input gives the same files."
)
SMALLEST_VOCAB = 257  # the bytes and the end of text
LONGEST_LINE = 256 << 20


@dataclass(kw_only=True, frozen=True)
class TrainingConfig:
    """Flags of the tool."""

    input: list[str] | None = None
    """Files with one JSON object on each line (.jsonl or .jsonl.gz). Required."""

    output_dir: str | None = None
    """Folder for the tokenizer's files. Required."""

    vocab_size: int = 32768
    """Size of the vocabulary: the end-of-text token, 256 bytes, and the merges."""

    json_keys: list[str] = field(default_factory=lambda: ["text"])
    """Keys of the JSON objects that hold text."""

    max_bytes: int | None = None
    """Train on about this many bytes, sampled evenly from the input. Default: on all of it."""

    min_frequency: int = 2
    """Smallest number of occurrences of a pair that is merged."""


def problems_of(config: TrainingConfig) -> Iterator[str]:
    """Yields a problem for each flag that is missing or impossible."""
    if not config.input:
        yield "{input:name} is required; name one or more .jsonl or .jsonl.gz files"
    if not config.output_dir:
        yield "{output_dir:name} is required; name a folder for the tokenizer's files"
    if config.vocab_size < SMALLEST_VOCAB:
        yield f"{{vocab_size}} must be at least {SMALLEST_VOCAB}, for the bytes and the end of text"
    if config.max_bytes is not None and config.max_bytes < 1:
        yield "{max_bytes} must be at least 1"
    if config.min_frequency < 1:
        yield "{min_frequency} must be at least 1"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    try:
        section = Section("flags", TrainingConfig, problems_of)
        flags = read_tool_flags(sys.argv[1:] if argv is None else argv, [section], USAGE, ABOUT)
        (config,) = flags.configs
        files = find_inputs(config.input)
        state = train(config, texts_of_files(files, config))
        write_tokenizer(Path(config.output_dir), state)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    size = len(state["model"]["vocab"])
    if size < config.vocab_size:
        print(
            f"warning: the text gives only {size} tokens, fewer than --vocab-size {config.vocab_size}", file=sys.stderr
        )
    print(f"{config.output_dir}: {size:,} tokens")
    return 0


def texts_of_files(files: Sequence[InputFile], config: TrainingConfig) -> Iterator[str]:
    """Yields the texts of the files, sampled evenly down to `max_bytes`.

    Raises UserError naming file and line for a line without text and for a line that is too long.
    """
    total = sum(file.size for file in files)
    read_before = taken = 0
    for file in files:
        with LineReader(file, LONGEST_LINE) as reader:
            for number, line in enumerate(reader.lines_before(sys.maxsize), 1):
                if line is None:
                    raise UserError(f"{file.path}:{number}: the line is longer than {LONGEST_LINE} bytes")
                read = reader.bytes_read if file.compressed else reader.position
                share = (read_before + read) / max(total, 1)
                if not line.strip() or (config.max_bytes is not None and taken > share * config.max_bytes):
                    continue
                taken += len(line)
                try:
                    yield from (text for texts in texts_of_line(line, config.json_keys) for text in texts)
                except BadLine as error:
                    raise UserError(f"{file.path}:{number}: {error.message}") from None
        read_before += file.size


def train(config: TrainingConfig, texts: Iterator[str]) -> dict[str, Any]:
    """Trains the merges. Returns the content of tokenizer.json."""
    tokenizers = load_library("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return json.loads(tokenizer.to_str())


def write_tokenizer(folder: Path, state: dict[str, Any]) -> None:
    """Writes the four files. Raises UserError if one cannot be written."""
    model = state["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    special = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | special
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "vocab.json", json.dumps(model["vocab"], ensure_ascii=False) + "\n")
        write_atomically(folder / "merges.txt", "\n".join(["#version: 0.2", *merges]) + "\n")
        write_atomically(folder / "tokenizer.json", json.dumps(state, ensure_ascii=False, indent=1) + "\n")
        write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--output-dir {folder}: {error.filename}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
