"""What text generation needs from a tokenizer: prompts of conversations, and texts that are never written."""

from collections.abc import Sequence

from megatron.core.exceptions import UserError
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.sft import SFTTokenizer

_FAMILIES = "SFTTokenizer", "HuggingFaceTokenizer"


def chat_tokenizer(flags: TokenizerConfig, template: str | None) -> SFTTokenizer:
    """Returns the tokenizer of a run with the chat template of a file, or by default that of the run or of the
    tokenizer's folder. Raises UserError if there is none."""
    if flags.family not in _FAMILIES:
        raise UserError(f"a {flags.family} has no chat template; only a Hugging Face tokenizer may have one")
    return SFTTokenizer(flags.tokenizer_model or "", flags.sft_tokenizer_prompt_format, template or flags.chat_template)


def banned_sequences(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the ids of texts, alone and after a blank, as `SamplingParams.bad_words` takes them. Raises UserError for
    a text that the tokenizer refuses."""
    found = [tuple(tokenizer.tokenize(text)) for text in texts]
    for text in texts:
        try:
            found.append(tuple(tokenizer.tokenize(" " + text)))
        except UserError:  # a tokenizer of ids reads no blank at the start
            continue
    return tuple(dict.fromkeys(ids for ids in found if ids))
