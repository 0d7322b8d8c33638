"""The vocabularies that TikTokenizer reads: a .json list, a file of base64 strings and ranks (Llama 3's
tokenizer.model), and the encodings of the `tiktoken` package."""

import base64
import binascii
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json
from megatron.data.tokenizer.base import load_library
from megatron.data.tokenizer.config import DEFAULT_SPECIAL_TOKENS, TIKTOKEN_ENCODING

DEFAULT_VOCAB_SIZE = 1 << 17
_LEGACY_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
_SPECIAL_TOKENS = (*_LEGACY_SPECIAL_TOKENS, "<mask>", "<pad>", "<cls>", "<sep>")
_LLAMA3_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
)
_NUM_LLAMA3_SPECIAL_TOKENS = 256

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The words of Llama 3, which are those of cl100k."""


@dataclass(frozen=True)
class Vocabulary:
    """What determines the ids of a text."""

    ranks: dict[bytes, int]
    """Ids of byte strings. A string with a smaller id is merged first."""
    special: dict[str, int]
    """Ids of special tokens."""
    pattern: str
    """Regular expression of the words within which bytes are merged."""


def read_vocabulary(
    model: str,
    pattern: str | None,
    vocab_size: int | None,
    num_special_tokens: int,
    special_tokens: Sequence[str] | None,
    legacy: bool,
) -> Vocabulary:
    """Reads what --tokenizer-model names; None stands for a flag that is not given. Raises UserError, naming the
    flag or the file, for a value or a file that cannot be used."""
    if model.startswith(TIKTOKEN_ENCODING):
        unused = {
            "--tiktoken-pattern": pattern,
            "--tiktoken-num-special-tokens": None if num_special_tokens == DEFAULT_SPECIAL_TOKENS else True,
            "--tiktoken-special-tokens": special_tokens,
        }
        for flag, value in unused.items():
            if value is not None:
                raise UserError(f"{flag}: drop it; {model} has a pattern and special tokens of its own")
        return _encoding_of_package(model.removeprefix(TIKTOKEN_ENCODING))
    path = Path(model)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"--tokenizer-model {path}: {error.strerror}; TikTokenizer reads a .json list, a file of base64 and ranks "
            f"such as Llama 3's tokenizer.model, or {TIKTOKEN_ENCODING}NAME, such as {TIKTOKEN_ENCODING}cl100k_base"
        ) from None
    if is_base64_and_ranks(content[:200]):
        ranks = _read_base64(path, content)
        count = _NUM_LLAMA3_SPECIAL_TOKENS if num_special_tokens == DEFAULT_SPECIAL_TOKENS else num_special_tokens
        named = _special_tokens(special_tokens or _LLAMA3_SPECIAL_TOKENS, count, "<|reserved_special_token_{}|>")
        special = {token: len(ranks) + i for i, token in enumerate(named)}
        return Vocabulary(ranks, special, LLAMA3_PATTERN if pattern is None else PATTERNS[pattern])
    default = _LEGACY_SPECIAL_TOKENS if legacy else _SPECIAL_TOKENS
    named = _special_tokens(special_tokens or default, num_special_tokens, "<SPECIAL_{}>")
    ranks = _read_json(path, content, DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size, num_special_tokens)
    ids = {token: rank + num_special_tokens for token, rank in ranks.items()}
    return Vocabulary(ids, {token: i for i, token in enumerate(named)}, PATTERNS[pattern or "v2"])


def is_base64_and_ranks(start: bytes) -> bool:
    """Whether a file that begins so has a byte string in base64 and its rank on each line."""
    first, _, rank = start.partition(b"\n")[0].strip().partition(b" ")
    try:
        return bool(first) and rank.isdigit() and bool(base64.b64decode(first, validate=True))
    except binascii.Error:
        return False


def end_of_document(special: dict[str, int]) -> str | None:
    """Returns the special token that ends a document; None without one."""
    return next((token for token in ("</s>", "<|end_of_text|>", "<|endoftext|>") if token in special), None)


def _special_tokens(given: Sequence[str], count: int, filler: str) -> list[str]:
    """Returns `count` names: those given, then `filler` with numbers. The .json list numbers all special tokens, Llama
    3's file those without another name."""
    named = list(given)
    if len(set(named)) < len(named) or len(named) > count or end_of_document(dict.fromkeys(named, 0)) is None:
        ends = "</s>" if "SPECIAL" in filler else "<|end_of_text|>, <|endoftext|> or </s>"
        raise UserError(
            f"--tiktoken-special-tokens {' '.join(named)}: they must differ, contain {ends} (it ends a document), "
            f"and be at most --tiktoken-num-special-tokens {count}"
        )
    first = len(named) if "SPECIAL" in filler else 0
    free = (filler.format(i) for i in itertools.count(first) if filler.format(i) not in given)
    return named + list(itertools.islice(free, count - len(named)))


def _read_json(path: Path, content: bytes, vocab_size: int, num_special_tokens: int) -> dict[bytes, int]:
    """Returns the ranks of the byte strings, as many as fit beside the special tokens."""
    wanted = vocab_size - num_special_tokens
    try:
        entries = parse_json(content.decode())
    except ValueError as error:
        raise UserError(
            f"--tokenizer-model {path}: neither lines of base64 and rank nor JSON in UTF-8: {error}"
        ) from None
    if wanted < 256 or not isinstance(entries, list) or len(entries) < wanted:
        found = len(entries) if isinstance(entries, list) else 0
        raise UserError(
            f"--tokenizer-model {path}: a list of {found} entries; --vocab-size {vocab_size} less "
            f"{num_special_tokens} special tokens needs {wanted}, and at least the 256 bytes"
        )
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[:wanted]):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
            in_order = entry["rank"] == rank
        except (TypeError, KeyError, binascii.Error) as error:
            raise UserError(f"--tokenizer-model {path}: entry {rank}: {error!r}") from None
        if not in_order or token in ranks or (rank < 256 and token != bytes([rank])):
            raise UserError(
                f"--tokenizer-model {path}: entry {rank} is rank {entry['rank']}, {token!r}; entries must come in "
                "order of rank, each once, the 256 single bytes first"
            )
        ranks[token] = rank
    return ranks


def _read_base64(path: Path, content: bytes) -> dict[bytes, int]:
    """Returns the ranks of lines of base64 and rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            in_order = int(rank) == len(ranks) and token not in ranks
        except ValueError:  # and binascii.Error, which is one
            in_order = False
        if not in_order:
            raise UserError(
                f"{path}:{number}: not a byte string in base64 and the rank {len(ranks)}; ranks must come in order, "
                "each string once"
            )
        ranks[token] = len(ranks)
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise UserError(f"--tokenizer-model {path}: has no token for the byte {missing}; all 256 are needed")
    return ranks


def _encoding_of_package(name: str) -> Vocabulary:
    """Returns an encoding that the tiktoken package has on this machine."""
    names = load_library("tiktoken").list_encoding_names()
    if name not in names:
        raise UserError(
            f"--tokenizer-model {TIKTOKEN_ENCODING}{name}: the package tiktoken has no such encoding, but "
            + ", ".join(sorted(names))
        )
    loading = load_library("tiktoken.load")
    download, loading.read_file = loading.read_file, _refuse_download
    try:
        made = load_library("tiktoken.registry").get_encoding(name)
    except _Absent as error:
        raise UserError(
            f"--tokenizer-model {TIKTOKEN_ENCODING}{name}: its file {error} is not on this machine, and nothing is "
            f'downloaded; run python -c "import tiktoken; tiktoken.get_encoding({name!r})" where there is a network, '
            "with TIKTOKEN_CACHE_DIR set to a folder, and set it to that folder here"
        ) from None
    finally:
        loading.read_file = download
    ranks = dict(sorted(made._mergeable_ranks.items(), key=lambda item: item[1]))
    return Vocabulary(ranks, dict(made._special_tokens), made._pat_str)


class _Absent(Exception):
    """A file of an encoding would be downloaded."""


def _refuse_download(url: str) -> NoReturn:
    raise _Absent(url.rsplit("/", 1)[-1])
