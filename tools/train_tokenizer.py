"""Trains a tokenizer on the text of .jsonl files.

python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 32768 --output-dir my_tokenizer

This writes a byte-level BPE: vocab.json and merges.txt for --tokenizer-type GPT2BPETokenizer, and tokenizer.json and
tokenizer_config.json for HuggingFaceTokenizer and other programs. With --tokenizer-type BertWordPieceLowerCase it
writes a vocab.txt, with --tokenizer-type SentencePieceTokenizer a tokenizer.model. The same input gives the same files.
"""

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.declarations.config_fields import flag
from megatron.core.exceptions import UserError
from megatron.core.utils.files import write_atomically
from megatron.data.preparation.blocks import LineReader
from megatron.data.preparation.inputs import InputFile, find_inputs
from megatron.data.preparation.json_lines import BadLine, texts_of_line
from megatron.data.preparation.readers import open_groups
from megatron.data.tokenizer.base import load_library
from megatron.data.tokenizer.bert_wordpiece import cut_words
from megatron.data.tokenizer.gpt2_bpe import END_OF_TEXT
from megatron.training.config.tool_flags import Section, read_tool_flags

USAGE = "python tools/train_tokenizer.py --input FILE ... --vocab-size N --output-dir DIR [flags]"
ABOUT = "Trains a tokenizer on the text of .jsonl files. The same input gives the same files."
SMALLEST_VOCAB = 257  # the bytes and the end of text
LARGEST_VOCAB = 10_000_000  # the trainers allocate memory for all of it
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LONGEST_LINE = 256 << 20


@dataclass(kw_only=True, frozen=True)
class TokenizerTrainingConfig:
    """Flags of the tool."""

    input: list[str] | None = None
    """Files with one JSON object on each line (plain, .gz or .zst), Parquet files, patterns and folders of
    them. Required."""

    output_dir: str | None = None
    """Folder for the tokenizer's files. Required."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer"
    ] = "GPT2BPETokenizer"
    """Kind of tokenizer: byte-level BPE, which HuggingFaceTokenizer reads too; WordPiece as in BERT; or a SentencePiece
    model, which GPTSentencePieceTokenizer and Llama2Tokenizer read too."""

    model_type: Literal["bpe", "unigram"] = flag("bpe", only_with="tokenizer_type=SentencePieceTokenizer")
    """SentencePieceTokenizer: algorithm of the model."""

    vocab_size: int = 32768
    """Size of the vocabulary, including special tokens and, for kinds that have them, the 256 bytes."""

    json_keys: list[str] = field(default_factory=lambda: ["text"])
    """Keys of the JSON objects that hold text."""

    max_bytes: int | None = None
    """Train on about this many bytes, sampled evenly from the input. Default: all of the input."""

    min_frequency: int = 2
    """Smallest number of occurrences of a pair that is merged. SentencePiece has no such bound."""


def problems_of(config: TokenizerTrainingConfig) -> Iterator[str]:
    """Yields a problem for each flag that is missing or impossible."""
    if not config.input:
        yield "{input:name} is required; name .jsonl files (also .gz, .zst), Parquet files or folders of them"
    if not config.output_dir:
        yield "{output_dir:name} is required; name a folder for the tokenizer's files"
    smallest = len(BERT_TOKENS) if config.tokenizer_type.startswith("Bert") else SMALLEST_VOCAB
    if config.vocab_size < smallest:
        what = "the special tokens" if config.tokenizer_type.startswith("Bert") else "the bytes and the end of text"
        yield f"{{vocab_size}} must be at least {smallest}, for {what}"
    if config.vocab_size > LARGEST_VOCAB:
        yield f"{{vocab_size}} must be at most {LARGEST_VOCAB}"
    if config.max_bytes is not None and config.max_bytes < 1:
        yield "{max_bytes} must be at least 1"
    if config.min_frequency < 1:
        yield "{min_frequency} must be at least 1"


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    section = Section("flags", TokenizerTrainingConfig, problems_of)
    (config,) = read_tool_flags(sys.argv[1:] if argv is None else argv, [section], USAGE, ABOUT)
    size = train_and_write(config, texts_of_files(find_inputs(config.input), config))
    if size < config.vocab_size:
        print(
            f"warning: the text gives only {size} tokens, fewer than --vocab-size {config.vocab_size}", file=sys.stderr
        )
    print(f"{config.output_dir}: {size:,} tokens")
    return 0


def texts_of_files(files: Sequence[InputFile], config: TokenizerTrainingConfig) -> Iterator[str]:
    """Yields the texts of the files, sampled evenly down to `max_bytes`.

    Raises UserError naming file and line for a line without text and for a line that is too long.
    """
    total = sum(file.size for file in files)
    read_before = taken = 0
    for file in files:
        for number, (line, read) in enumerate(lines_of_file(file, config.json_keys), 1):
            if line is None:
                raise UserError(f"{file.path}:{number}: the line is longer than {LONGEST_LINE} bytes")
            share = (read_before + read) / max(total, 1)
            if not line.strip() or (config.max_bytes is not None and taken > share * config.max_bytes):
                continue
            taken += len(line)
            try:
                yield from (text for texts in texts_of_line(line, config.json_keys) for text in texts)
            except BadLine as error:
                raise UserError(f"{file.path}:{number}: {error.message}") from None
        read_before += file.size


def lines_of_file(file: InputFile, keys: Sequence[str]) -> Iterator[tuple[bytes | None, int]]:
    """Yields the lines of a file, or the rows of a Parquet file, each with the bytes of the file read so far."""
    if file.has_groups:
        with open_groups(file, keys, LONGEST_LINE) as rows:
            for group in range(file.row_groups):
                for line in rows.lines_of_group(group):
                    yield line, rows.bytes_read
        return
    with LineReader(file, LONGEST_LINE) as lines:
        for line in lines.lines_before(sys.maxsize):
            yield line, lines.bytes_read if file.compressed else lines.position


def train_and_write(config: TokenizerTrainingConfig, texts: Iterator[str]) -> int:
    """Trains a tokenizer and writes its files. Returns the size of its vocabulary."""
    folder = Path(config.output_dir or "")
    if config.tokenizer_type == "GPT2BPETokenizer":
        state = train_byte_level_bpe(config, texts)
        write_files(folder, files_of_byte_level_bpe(state))
        return len(state["model"]["vocab"])
    if config.tokenizer_type == "SentencePieceTokenizer":
        model, size = train_sentencepiece(config, texts)
        write_files(folder, {"tokenizer.model": model})
        return size
    tokens = train_wordpiece(config, texts)
    write_files(folder, {"vocab.txt": "".join(f"{token}\n" for token in tokens).encode()})
    return len(tokens)


def train_byte_level_bpe(config: TokenizerTrainingConfig, texts: Iterator[str]) -> dict[str, Any]:
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


def train_wordpiece(config: TokenizerTrainingConfig, texts: Iterator[str]) -> list[str]:
    """Trains pieces of the words that BERT's basic tokenization gives. Returns the tokens in the order of their ids.

    Characters, the most frequent first, take at most half of the vocabulary; words with other characters are left out.
    """
    lower_case = config.tokenizer_type == "BertWordPieceLowerCase"
    words = Counter(word for text in texts for word in cut_words(text, lower_case))
    seen: Counter[str] = Counter()
    for word, count in words.items():
        seen.update({word[0]: count})
        for character, times in Counter(word[1:]).items():
            seen.update({f"##{character}": times * count})
    ordered = sorted((-count, token) for token, count in seen.items() if count >= config.min_frequency)
    alphabet = {token for _, token in ordered[: (config.vocab_size - len(BERT_TOKENS)) // 2]}
    known = [word for word in sorted(words) if {word[0], *(f"##{character}" for character in word[1:])} <= alphabet]

    tokenizers = load_library("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=[*BERT_TOKENS, *sorted(alphabet)],  # given in order, since the library's own order is random
        continuing_subword_prefix="##",
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator((f"{word} " * words[word] for word in known), trainer)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    return sorted(vocab, key=lambda token: vocab[token])


def train_sentencepiece(config: TokenizerTrainingConfig, texts: Iterator[str]) -> tuple[bytes, int]:
    """Trains a model with Llama 2's settings: text is not normalized, each digit is a token, unknown characters become
    bytes. Ids 0 to 3 are <unk>, <s>, </s> and <pad>. Returns the model and its size."""
    library = load_library("sentencepiece")
    written = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.split("\n") if line),
            model_writer=written,
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hard_vocab_limit=False,
            num_threads=1,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            byte_fallback=True,
            character_coverage=0.99995,
            max_sentence_length=1 << 30,
            pad_id=3,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        why = f"bytes and characters alone take {needed[1]}" if needed else f"sentencepiece cannot train it: {error}"
        raise UserError(f"--vocab-size {config.vocab_size}: {why}") from None
    model = written.getvalue()
    return model, library.SentencePieceProcessor(model_proto=model).get_piece_size()


def files_of_byte_level_bpe(state: dict[str, Any]) -> dict[str, bytes]:
    """Returns the four files of a byte-level BPE by name. `state` is the content of tokenizer.json."""
    model = state["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    special = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | special
    texts = {
        "vocab.json": json.dumps(model["vocab"], ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *merges]),
        "tokenizer.json": json.dumps(state, ensure_ascii=False, indent=1),
        "tokenizer_config.json": json.dumps(config, indent=2),
    }
    return {name: f"{text}\n".encode() for name, text in texts.items()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files of these names. Raises UserError if one cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise UserError(f"--output-dir {folder}: {error.filename}: {error.strerror}") from None


if __name__ == "__main__":
    run_main(main)
