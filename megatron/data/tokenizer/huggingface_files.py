"""The files of a Hugging Face tokenizer: tokenizer.json, and the special tokens that only the files beside it name."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json
from megatron.data.tokenizer.base import load_library
from megatron.data.tokenizer.tiktoken_vocabulary import is_base64_and_ranks

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LIST, _OLD_LIST, _ROLES_OF_LIST = "extra_special_tokens", "additional_special_tokens", "extra_special_tokens by role"
_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of the files of a tokenizer; empty where a file does not exist."""

    tokenizer: Path
    config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    added_tokens: Mapping[str, Any]


@contextmanager
def naming_failures_of_library(what: str) -> Iterator[None]:
    """Turns what the `tokenizers` library raises into a UserError that begins with `what`. Its panics are no
    `Exception`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {error}") from None


def find_files(path: Path) -> TokenizerFiles:
    """Reads the files beside a tokenizer.json. Raises UserError if `path` is no such file and no folder with one."""
    if not os.path.exists(path):  # which is False for a name that is too long; Path.exists raises
        raise UserError(
            f"--tokenizer-model {path}: no such folder or file; HuggingFaceTokenizer reads a local folder with a "
            "tokenizer.json, or such a file (nothing is downloaded)"
        )
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"--tokenizer-model {path}: no tokenizer.json in it; {_what_slow_files_need(path)}")
    if file.suffix in (".model", ".tiktoken", ".txt") or file.name == "vocab.json":
        raise UserError(f"--tokenizer-model {path}: not a tokenizer.json; {_what_slow_files_need(path.parent, path)}")
    return TokenizerFiles(file, *(read_json_object(file.parent / name) for name in (_CONFIG, _MAP, _ADDED)))


def _what_slow_files_need(folder: Path, file: Path | None = None) -> str:
    """Returns the remedy for a folder, or a file of it, that only a slow tokenizer reads: the flags of the tokenizer
    that reads what is there."""
    there = " reads what is there"
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        vocab, merges = folder / "vocab.json", folder / "merges.txt"
        return f"--tokenizer-type GPT2BPETokenizer --vocab-file {vocab} --merge-file {merges}{there}"
    named = [file] if file is not None else sorted(folder.iterdir()) if folder.is_dir() else []
    for model in named:
        if model.suffix in (".model", ".tiktoken"):
            start = model.open("rb").read(200)
            family = "TikTokenizer" if is_base64_and_ranks(start) else "SentencePieceTokenizer"
            return f"--tokenizer-type {family} --tokenizer-model {model}{there}"
        if model.name == "vocab.txt":
            return f"--tokenizer-type BertWordPieceLowerCase (or BertWordPieceCase) --vocab-file {model}{there}"
    return (
        "a folder with only a slow tokenizer is converted by transformers.AutoTokenizer.from_pretrained(folder)"
        ".save_pretrained(folder)"
    )


def read_json_object(path: Path) -> Mapping[str, Any]:
    """Returns the JSON object of a file; an empty one if the file does not exist."""
    if not path.exists():
        return {}
    try:
        content = parse_json(path.read_text("utf-8"), with_nan=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON in UTF-8: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content


def load_tokenizer(files: TokenizerFiles) -> tuple[Any, dict[str, str]]:
    """Returns the library's tokenizer with all tokens that the files name, at the ids that transformers gives them, and
    the spellings of the special tokens by role. Raises UserError, naming the file, if a file is invalid."""
    with naming_failures_of_library(f"--tokenizer-model {files.tokenizer}: not a tokenizer.json"):
        library = load_library("tokenizers").Tokenizer.from_file(str(files.tokenizer))
        vocab = library.get_vocab(with_added_tokens=True)
    for token, number in vocab.items():
        if number > _MAX_ID:
            raise UserError(
                f"--tokenizer-model {files.tokenizer}: token {token!r} has the id {number}; ids go up to {_MAX_ID}"
            )
    if not vocab:
        raise UserError(f"--tokenizer-model {files.tokenizer}: its vocabulary is empty")
    special = _add_tokens(library, files)
    library.no_truncation()
    library.no_padding()
    return library, special


def _add_tokens(library: Any, files: TokenizerFiles) -> dict[str, str]:
    """Adds the tokens that only the files beside tokenizer.json name, in the order of transformers: numbered ones,
    those with a role, then the list. Returns the special tokens by role."""
    named, listed = _special_tokens(library, files)
    own = list(library.get_added_tokens_decoder().values())
    known = {token.content: repr(token) for token in own}
    numbered = _numbered_tokens(files, {token.content for token in [*named.values(), *listed]})
    roles = {token.content for token in named.values()}
    for token in own:
        if token.content in roles and not token.special:
            token.special = True
            library.add_tokens([token])
    for number, (file, token) in sorted(numbered.items()):
        if known.get(token.content) == repr(token) or (file.name == _ADDED and token.content in known):
            continue
        token.special = token.special or token.content in roles
        library.add_tokens([token])  # other flags of a token that tokenizer.json has take effect
        known[token.content] = repr(token)
        found = library.token_to_id(token.content)
        if found != number:
            raise UserError(
                f"{file}: added token {token.content!r} has id {number} there, but would be {found} after the "
                "vocabulary of tokenizer.json"
            )
    for token in {repr(token): token for token in [*named.values(), *listed] if token.content not in known}.values():
        token.special = token.special or token.content in roles
        library.add_tokens([token])
    return {role: token.content for role, token in named.items()}


def _special_tokens(library: Any, files: TokenizerFiles) -> tuple[dict[str, Any], list[Any]]:
    """Returns the special tokens by role, and those of the list without a role.

    special_tokens_map.json counts only if tokenizer_config.json has no added_tokens_decoder; its roles then replace
    those of tokenizer_config.json, and its list follows.
    """
    config, other = (files.tokenizer.parent / name for name in (_CONFIG, _MAP))
    found = {key: (config, value) for key, value in files.config.items() if value is not None}
    if _OLD_LIST in found and not found.get(_LIST, (config, None))[1]:
        found[_LIST] = found.pop(_OLD_LIST)
    _take_roles_of_list(found)
    if "added_tokens_decoder" not in files.config:
        more = {key: (other, value) for key, value in files.special_tokens_map.items() if value is not None}
        both = [source.get(_LIST, (other, []))[1] for source in (found, more)]
        if _LIST in more and all(isinstance(tokens, list) for tokens in both):
            more[_LIST] = other, both[0] + [token for token in both[1] if token not in both[0]]
        found |= more
        _take_roles_of_list(found)
    if _LIST not in found and _OLD_LIST in found:
        found[_LIST] = found[_OLD_LIST]
    if library.padding is not None and "pad_token" not in found:
        found["pad_token"] = files.tokenizer, library.padding["pad_token"]
    own_roles = [key for key, (_, value) in found.items() if key.endswith("_token") and isinstance(value, (str, dict))]
    named = {role: _token(*found[role], role) for role in dict.fromkeys([*_ROLES, *own_roles]) if role in found}
    place, more_roles = found.get(_ROLES_OF_LIST, (config, {}))
    named |= {role: _token(place, token, f"{_LIST} {role}") for role, token in more_roles.items()}
    place, tokens = found.get(_LIST, (config, []))
    if not isinstance(tokens, list):
        raise UserError(f"{place}: {_LIST} is not a list of tokens")
    return named, [_token(place, token, f"{_LIST}[{number}]") for number, token in enumerate(tokens)]


def _take_roles_of_list(found: dict[str, tuple[Path, Any]]) -> None:
    """Moves a list that is an object, which gives each token a role, to an entry of its own."""
    place, tokens = found.get(_LIST, (None, None))
    if place is not None and isinstance(tokens, Mapping):
        del found[_LIST]
        found[_ROLES_OF_LIST] = place, {**found.get(_ROLES_OF_LIST, (place, {}))[1], **tokens}


def _numbered_tokens(files: TokenizerFiles, special: set[str]) -> dict[int, tuple[Path, Any]]:
    """Returns the tokens of added_tokens_decoder, or otherwise of added_tokens.json, with their file, by id."""
    config = files.tokenizer.parent / _CONFIG
    if "added_tokens_decoder" in files.config:
        entries = files.config["added_tokens_decoder"] or {}
        if not isinstance(entries, Mapping):
            raise UserError(f"{config}: added_tokens_decoder is not an object")
        return {
            _id_of(config, number): (config, _token(config, token, f"added_tokens_decoder {number}"))
            for number, token in entries.items()
        }
    added = files.tokenizer.parent / _ADDED
    found = {}
    for content, number in files.added_tokens.items():
        token = {"content": content, "normalized": content not in special, "special": content in special}
        found[_id_of(added, number)] = added, _token(added, token, repr(content))
    return found


def _id_of(file: Path, number: Any) -> int:
    try:
        value = int(number)
    except (TypeError, ValueError):
        value = -1
    if isinstance(number, (bool, float)) or not 0 <= value <= _MAX_ID:
        raise UserError(f"{file}: {number!r} is not an id of a token; ids go from 0 to {_MAX_ID}")
    return value


def _token(file: Path, value: Any, where: str) -> Any:
    """Returns the token of an entry: a text (a special token), or an object with "content" and flags of matching."""
    entry = {"content": value, "special": True} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str) or not entry["content"]:
        raise UserError(f'{file}: {where} is not a token; expected a text, or an object with a text as "content"')
    flags = {key: entry[key] for key in _FLAGS if key in entry}
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            raise UserError(f"{file}: {where} has {key} {flag!r}; expected true or false")
    return load_library("tokenizers").AddedToken(
        entry["content"], **(flags | ({"special": True} if file.name == _MAP else {}))
    )
