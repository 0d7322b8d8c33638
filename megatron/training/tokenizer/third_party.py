"""The optional libraries that read tokenizer files, loaded when a tokenizer needs them."""

import importlib
from typing import Any

from megatron.core.exceptions import UserError


def load_tokenizers() -> Any:
    """The Rust library behind byte-level BPE and tokenizer.json files."""
    return _load("tokenizers")


def load_tiktoken() -> Any:
    """The Rust library behind TikTokenizer."""
    return _load("tiktoken")


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"this tokenizer needs the package {name}: pip install {name} (the extra [mlm]); {error}"
        ) from None
