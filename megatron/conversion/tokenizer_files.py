"""The tokenizer of a converted model: its files in the folder, its ids in config.json, and the flags that name it."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron.conversion.model_folder import CONFIG, read_json
from megatron.core.dist_checkpointing.checkpoint_selection import Log
from megatron.core.exceptions import UserError
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.bert_wordpiece import BertWordPieceTokenizer
from megatron.data.tokenizer.build import build_tokenizer
from megatron.data.tokenizer.config import TokenizerConfig, TokenizerType
from megatron.data.tokenizer.gpt2_bpe import END_OF_TEXT, GPT2BPETokenizer
from megatron.data.tokenizer.huggingface import HuggingFaceTokenizer
from megatron.data.tokenizer.sentencepiece import SentencePieceTokenizer
from megatron.training.config.pretrain_config import PretrainConfig

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
VOCAB, MERGES = "vocab.json", "merges.txt"
WORD_PIECES = "vocab.txt"
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
"""Classes of transformers for the files of GPT-2's tokenizer."""
_BERT_CLASSES = ("BertTokenizer", "BertTokenizerFast")
"""Classes of transformers for the file of BERT's tokenizer."""
_PIECES, _ADDED = "tokenizer.model", "added_tokens.json"
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
"""Classes of transformers for a SentencePiece model whose ids are those of its pieces."""

_CHAT_TEMPLATE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
"""Folder of chat templates with names, such as for tools."""
_TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    _ADDED,
    VOCAB,
    MERGES,
    WORD_PIECES,
    _PIECES,
    _CHAT_TEMPLATE,
)
GENERATION_CONFIG = "generation_config.json"
_NULL: Literal["NullTokenizer"] = "NullTokenizer"
_START = "decoder_start_token_id"
_ONE_ID = ("bos_token_id", "pad_token_id", _START)
"""Keys of config.json with a token id."""


def names_of_files(folder: Path) -> list[str]:
    """Returns the names of the files of a tokenizer in a folder."""
    return [name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def copy_tokenizer(source: Path, target: Path, template: str | None = None) -> list[str]:
    """Copies the files of a tokenizer into a folder, which is created if there are any. Returns their names.

    The settings of generation go with them, also without a tokenizer, and get the ids that begin, end and pad a text if
    only the folder's config.json has them. The file `template`, if it is given, replaces the chat template.
    """
    if source.resolve() == target.resolve():
        return names_of_files(source)
    names, settings = names_of_files(source), _settings_of(source)
    if not names and not settings:
        return []
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)
    if settings:
        content = json.dumps(settings, indent=2)
        (target / GENERATION_CONFIG).write_text(f"{content}\n", encoding="utf-8")
        names.append(GENERATION_CONFIG)
    if (source / _MORE_TEMPLATES).is_dir():
        shutil.copytree(source / _MORE_TEMPLATES, target / _MORE_TEMPLATES, dirs_exist_ok=True)
    if template is not None:
        shutil.copyfile(template, target / _CHAT_TEMPLATE)
    return names


def _settings_of(folder: Path) -> dict[str, Any]:
    """Returns the settings of generation in a folder, with the ids that only its config.json has."""
    file = folder / GENERATION_CONFIG
    settings = read_json(file, with_nan=True) if file.is_file() else {}
    ids = {key: _id_in(folder, key) for key in _ONE_ID} | {"eos_token_id": listed_ends(folder) or None}
    return settings | {key: found for key, found in ids.items() if found is not None and settings.get(key) is None}


def _found_in(folder: Path, key: str) -> Iterator[tuple[Path, Any]]:
    """Yields the values of a key in a folder's generation_config.json and in its config.json, where a multimodal model
    may have it in `text_config`, and the files; those that are absent or null are left out."""
    for file in (folder / GENERATION_CONFIG, folder / CONFIG):
        content = read_json(file, with_nan=True) if file.is_file() else {}
        found = content.get(key, (content.get("text_config") or {}).get(key))
        if found is not None:
            yield file, found


def _id_in(folder: Path, key: str) -> int | None:
    """Returns a token id in a folder, by its key; None if there is none."""
    return next((found for _, found in _found_in(folder, key) if type(found) is int and found >= 0), None)


def listed_ends(folder: Path) -> list[int]:
    """Returns the ids that end a text by `eos_token_id` in a folder's generation_config.json or, if that has none, in
    its config.json, where a multimodal model may have it in `text_config`; empty without either. Raises UserError for
    anything else than an id or a list of ids."""
    for file, found in _found_in(folder, "eos_token_id"):
        ids = found if isinstance(found, list) else [found]
        if not all(type(number) is int and number >= 0 for number in ids):
            raise UserError(f"{file}: eos_token_id is {found!r}; it must be a token id or a list of token ids")
        return list(dict.fromkeys(ids))
    return []


def end_ids(flags: TokenizerConfig, tokenizer: Tokenizer) -> list[int]:
    """Returns all ids that end a generated text: that of the tokenizer, and those that the model's folder lists beside
    the tokenizer's files."""
    own, folder = tokenizer.eod if tokenizer.eos is None else tokenizer.eos, _folder_of(flags)
    ends = [] if folder is None else listed_ends(folder)
    return ends if ends and flags.family == _NULL else list(dict.fromkeys([own, *ends]))


def _folder_of(flags: TokenizerConfig) -> Path | None:
    """Returns the folder with the files of a tokenizer, or that of a NullTokenizer's ids; None without files."""
    file = flags.tokenizer_model or flags.vocab_file
    if file is None or Path(file).is_dir():
        return None if file is None else Path(file)
    return None if flags.family == _NULL else Path(file).parent


# ---------------------------------------------------------------------------------------------------------------------
# Import


def tokenizer_flags(folder: Path, vocab_size: int, place: Path, log: Log) -> list[str]:
    """Returns the flags of the folder's tokenizer; those of NullTokenizer if there is none that can be used. These name
    the folder too, if it has something that an export takes along."""
    null = ["--tokenizer-type", _NULL, "--vocab-size", str(vocab_size - 1)]
    null += ["--tokenizer-model", str(place)] if names_of_files(folder) or _settings_of(folder) else []
    if (folder / TOKENIZER).is_file():
        file, ids = TOKENIZER, HuggingFaceTokenizer(str(folder), False).vocab_size
        words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(place)]
    elif _has_tokenizer_of(_BERT_CLASSES, folder, WORD_PIECES):
        lower_case = read_json(folder / TOKENIZER_CONFIG).get("do_lower_case", True)
        try:
            _check_words(folder, lower_case)
            file, ids = WORD_PIECES, BertWordPieceTokenizer(str(folder / WORD_PIECES), lower_case).vocab_size
        except UserError as error:
            log(f"the flags name NullTokenizer, for which text is token ids: {error}")
            return null
        words = ["--tokenizer-type", f"BertWordPiece{'LowerCase' if lower_case else 'Case'}"]
        words += ["--vocab-file", str(place / WORD_PIECES)]
    elif _has_tokenizer_of(_GPT2_CLASSES, folder, VOCAB, MERGES):
        file, ids = VOCAB, GPT2BPETokenizer(str(folder / VOCAB), str(folder / MERGES)).vocab_size
        words = ["--tokenizer-type", "GPT2BPETokenizer"]
        words += ["--vocab-file", str(place / VOCAB), "--merge-file", str(place / MERGES)]
    elif _has_tokenizer_of(_LLAMA_CLASSES, folder, _PIECES) and not (folder / _ADDED).exists():
        try:
            pieces = SentencePieceTokenizer(str(folder / _PIECES), "Llama2Tokenizer", keeps_blanks=True)
        except UserError as error:
            log(f"the flags name NullTokenizer, for which text is token ids: {error}")
            return null
        file, ids = _PIECES, pieces.vocab_size
        words = ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(place / _PIECES)]
    else:
        log(f"{folder} has no {TOKENIZER}: the flags name NullTokenizer, for which text is token ids")
        return null
    if ids > vocab_size:
        log(f"{folder / file} has {ids} ids but the model has {vocab_size}: the flags name NullTokenizer")
        return null
    return [*words, *(["--vocab-size", str(vocab_size)] if vocab_size > ids else [])]


def _has_tokenizer_of(classes: Sequence[str], folder: Path, *names: str) -> bool:
    """Whether a folder has these files of a tokenizer, without a tokenizer.json, and says that it is one of `classes`
    of transformers."""
    if not all((folder / name).is_file() for name in (*names, TOKENIZER_CONFIG)):
        return False
    return read_json(folder / TOKENIZER_CONFIG).get("tokenizer_class") in classes


def _check_words(folder: Path, lower_case: bool) -> None:
    """Raises UserError if BERT's tokenizer of this folder cuts a text into other words than ours."""
    expected = {"strip_accents": lower_case, "tokenize_chinese_chars": True}
    for key, value in read_json(folder / TOKENIZER_CONFIG).items():
        if key in expected and value not in (None, expected[key]):
            raise UserError(f"{folder / TOKENIZER_CONFIG}: {key} is {value}, and ours has {expected[key]} only")


# ---------------------------------------------------------------------------------------------------------------------
# Export


def special_ids(
    config: PretrainConfig, folder: Path | None, vocab_size: int, log: Log
) -> dict[str, int | list[int] | None]:
    """Returns the ids that begin, end and pad a text, as keys of config.json, from the tokenizer's folder that was
    given, or from the run's tokenizer. Ids beside the tokenizer's files come before those of the tokenizer.

    Unknown ids are null: transformers gives absent keys the ids of a published model, at which a generated text would
    end. A NullTokenizer may stand in for any tokenizer, so its own ids are unknown.
    """
    flags = config.tokenizer
    if folder is not None:
        family: TokenizerType = "HuggingFaceTokenizer" if (folder / TOKENIZER).is_file() else _NULL
        flags = TokenizerConfig(tokenizer_type=family, tokenizer_model=str(folder))
    place = _folder_of(flags)
    keys = [key for key in _ONE_ID if key != _START or config.model.model_family == "t5"]
    ids: dict[str, int | list[int] | None] = dict.fromkeys((*keys, "eos_token_id"))
    own: dict[str, int | None] = {}
    ends = [] if place is None else listed_ends(place)
    if flags.family != _NULL:
        try:
            known = build_tokenizer(flags)
        except UserError as error:  # its files are gone, or it has no id that ends a text
            log(f"config.json names no tokens that begin and end a text: {error}")
            return ids
        ends = end_ids(flags, known)
        own = {"bos_token_id": known.bos, "pad_token_id": known.pad}
        own[_START] = known.pad if known.bos is None else known.bos
    for key in keys:
        given = None if place is None else _id_in(place, key)
        ids[key] = _in_model(own.get(key) if given is None else given, vocab_size)
    ends = [number for number in ends if number < vocab_size]
    return ids | {"eos_token_id": ends if len(ends) > 1 else next(iter(ends), None)}


def _in_model(number: int | None, vocab_size: int) -> int | None:
    """Returns the id, or None if the model has no row for it."""
    return number if number is not None and 0 <= number < vocab_size else None


def writer_of_tokenizer(flags: TokenizerConfig, folder: Path | None, log: Log) -> Callable[[Path], object]:
    """Returns the function that writes the tokenizer's files into a folder: those of the folder that was given, or
    those of the run's tokenizer if transformers can read them and they still exist.

    Raises UserError if the folder that was given has no such files.
    """
    if folder is not None:
        if not names_of_files(folder):
            raise UserError(f"--tokenizer-model {folder}: no folder with the files of a tokenizer, such as {TOKENIZER}")
        return partial(copy_tokenizer, folder)
    if flags.family in ("HuggingFaceTokenizer", "SFTTokenizer", "Llama2Tokenizer", _NULL):
        folder = _folder_of(flags)
        is_named = flags.family != "Llama2Tokenizer" or Path(flags.tokenizer_model or "").name == _PIECES
        if folder is not None and is_named and (names_of_files(folder) or flags.family == _NULL):
            return partial(copy_tokenizer, folder, template=flags.chat_template)
    elif flags.family == "GPT2BPETokenizer":
        vocab, merges = Path(flags.vocab_file or ""), Path(flags.merge_file or "")
        if vocab.is_file() and merges.is_file():
            return partial(_write_gpt2_tokenizer, vocab, merges)
    elif flags.family.startswith("BertWordPiece") and Path(flags.vocab_file or "").is_file():
        return partial(_write_bert_tokenizer, flags)
    if flags.family != _NULL or flags.tokenizer_model is not None:
        log(
            f"the files of the run's {flags.family} are gone, or transformers cannot read them: the export "
            "has no tokenizer; --tokenizer-model names a folder to copy one from"
        )
    return _write_nothing


def _write_nothing(folder: Path) -> None:
    """Writes no tokenizer."""


def _write_gpt2_tokenizer(vocab_file: Path, merge_file: Path, target: Path) -> None:
    """Writes the files of a GPT2BPETokenizer into a folder, such that transformers reads them as GPT-2's tokenizer. It
    matches the end-of-text token in texts, which ours does not."""
    shutil.copyfile(vocab_file, target / VOCAB)
    shutil.copyfile(merge_file, target / MERGES)
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    content = {"tokenizer_class": _GPT2_CLASSES[0], **roles, "add_prefix_space": False}
    (target / TOKENIZER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_bert_tokenizer(flags: TokenizerConfig, target: Path) -> None:
    """Writes the file of a BertWordPieceTokenizer into a folder, with the tokens that it adds, such that transformers
    reads it as BERT's tokenizer with the same ids. That one puts [CLS] and [SEP] around a text, and finds special
    tokens in texts."""
    assert flags.vocab_file is not None
    lower_case = flags.family == "BertWordPieceLowerCase"
    tokens = BertWordPieceTokenizer(flags.vocab_file, lower_case, flags.vocab_extra_ids).inv_vocab.values()
    (target / WORD_PIECES).write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    content = {"tokenizer_class": _BERT_CLASSES[0], "do_lower_case": lower_case, "strip_accents": lower_case}
    (target / TOKENIZER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
