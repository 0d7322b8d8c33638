"""The tokenizer of a GGUF file, from the files of a Hugging Face folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.conversion.hub_defaults import Json
from megatron.conversion.model_folder import CONFIG, read_json
from megatron.conversion.tokenizer_files import MERGES, TOKENIZER, TOKENIZER_CONFIG, VOCAB
from megatron.core.exceptions import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens in GGUF."""

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _ENGLISH + r"\p{N}{1,3}" + _AFTER_DIGITS: "llama-bpe",
    _ENGLISH + r"\p{N}" + _AFTER_DIGITS: "qwen2",
}
"""llama.cpp's names of the patterns that cut a text into words, of Llama 3 and of Qwen2."""


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer as GGUF stores it. A list has a value for each id of the model."""

    model: str
    """`gpt2`: byte-level BPE; `llama`: BPE with byte fallback, as in SentencePiece; `none`: token ids only."""
    pre: str | None = None
    """llama.cpp's name of the pattern that cuts a text into words."""
    tokens: tuple[str, ...] = ()
    types: tuple[int, ...] = ()
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    ids: tuple[tuple[str, int], ...] = ()
    """Ids with a role, by key without `tokenizer.ggml.`."""
    switches: tuple[tuple[str, bool], ...] = ()
    """Whether something is added before or behind a text, by key without `tokenizer.ggml.`."""
    chat_template: str | None = None


def read_tokenizer(folder: Path, vocab_size: int, log: Callable[[str], object]) -> GgufTokenizer:
    """Returns the tokenizer of a folder for a model with `vocab_size` rows; rows without a token get an unused one.

    Raises UserError if llama.cpp would cut a text into other tokens, or if there are more tokens than rows.
    """
    file = folder / TOKENIZER
    if file.is_file():
        content = read_json(file)
    elif (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        content = _of_gpt2(folder)
    else:
        log(f"{folder} has no {TOKENIZER}: the GGUF file has no tokenizer, so llama.cpp takes token ids only")
        return GgufTokenizer("none")
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise UserError(f"{file}: --to-gguf writes tokenizers of the type BPE, not {model['type']}")
    texts = {number: text for text, number in model["vocab"].items()}
    types = dict.fromkeys(texts, NORMAL)
    for added in content.get("added_tokens") or ():
        texts[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if texts and max(texts) >= vocab_size:
        raise UserError(f"{file} has the id {max(texts)}, but the model has {vocab_size} rows")
    tokens = tuple(texts.get(number, f"[PAD{number}]") for number in range(vocab_size))
    merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    ids, switches = _roles(folder, content, texts)
    template = _chat_template(folder)
    if not model.get("byte_fallback"):
        of_rows = tuple(types.get(number, UNUSED) for number in range(vocab_size))
        pre = _pre(content, file)
        return GgufTokenizer("gpt2", pre, tokens, of_rows, merges, (), ids, switches, template)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    types |= {number: BYTE for number, text in texts.items() if _is_byte(text)}
    types |= {number: UNKNOWN for number, text in texts.items() if text == model.get("unk_token")}
    of_rows = tuple(types.get(number, UNUSED) for number in range(vocab_size))
    scores = tuple(-float(ranks.get(text, len(ranks))) for text in tokens)  # the best is merged first
    switches = (*switches, ("add_space_prefix", _adds_space(content)))
    return GgufTokenizer("llama", "default", tokens, of_rows, (), scores, ids, switches, template)


def _of_gpt2(folder: Path) -> Json:
    """Returns the content that a tokenizer.json of the files of GPT-2's tokenizer would have."""
    lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    vocab = read_json(folder / VOCAB)
    end = read_json(folder / TOKENIZER_CONFIG).get("eos_token") if (folder / TOKENIZER_CONFIG).is_file() else None
    added = [{"id": vocab[end], "content": end, "special": True}] if end in vocab else []
    return {"model": {"vocab": vocab, "merges": merges}, "added_tokens": added, "pre_tokenizer": {"type": "ByteLevel"}}


def _pre(content: Json, file: Path) -> str:
    """Returns llama.cpp's name of the pattern of a byte-level tokenizer. Raises UserError if it has none here."""
    found = content.get("pre_tokenizer") or {}
    normalizer = (content.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise UserError(f"{file}: --to-gguf writes no normalizer {normalizer}; llama.cpp would tokenize otherwise")
    parts = found["pretokenizers"] if found.get("type") == "Sequence" else [found]
    kinds = [part.get("type") for part in parts]
    has_prefix = any(part.get("add_prefix_space", False) for part in parts)
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True) and not has_prefix:
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True) and not has_prefix:
        pattern = (parts[0].get("pattern") or {}).get("Regex")
        if pattern in _SPLITS:
            return _SPLITS[pattern]
    raise UserError(
        f"{file}: its pre_tokenizer is none of those that --to-gguf can name for llama.cpp: GPT-2's, Llama 3's and "
        "Qwen2's; --tokenizer-model names a folder with another tokenizer"
    )


Roles = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, bool], ...]]
"""Ids of roles; whether they are added to a text."""


def _roles(folder: Path, content: Json, texts: dict[int, str]) -> Roles:
    """Returns the ids with a role, and whether those that begin and end a text are added to it."""
    config = read_json(folder / CONFIG, with_nan=True)
    ends = config.get("eos_token_id")
    unknown = {text: number for number, text in texts.items()}.get(content["model"].get("unk_token"))
    given = {
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": ends[0] if isinstance(ends, list) else ends,
        "padding_token_id": config.get("pad_token_id"),
        "unknown_token_id": unknown,
    }
    template = _template(content.get("post_processor") or {})
    names = [next(iter(part)) for part in template]
    switches = ("add_bos_token", names[:1] == ["SpecialToken"]), ("add_eos_token", names[-1:] == ["SpecialToken"])
    return tuple((key, number) for key, number in given.items() if number is not None), switches


def _template(processor: Json) -> list[Json]:
    """Returns the parts that a post-processor makes of one text."""
    if processor.get("type") == "Sequence":
        return next((found for part in processor["processors"] if (found := _template(part))), [])
    return list(processor.get("single") or []) if processor.get("type") == "TemplateProcessing" else []


def _adds_space(content: Json) -> bool:
    """Whether a tokenizer of SentencePiece's form puts a space before a text."""
    normalizer, found = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if any(step.get("type") == "Prepend" for step in steps):
        return True
    return found.get("type") == "Metaspace" and found.get("prepend_scheme", "always") != "never"


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _chat_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = read_json(folder / TOKENIZER_CONFIG).get("chat_template") if (folder / TOKENIZER_CONFIG).is_file() else None
    return found if isinstance(found, str) else None
