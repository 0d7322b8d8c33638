"""Tokenizers by NeMo's names. They only say which of this package's tokenizers a run builds."""

from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.facades.nemo.lightning.flags import Flags


@dataclass(frozen=True)
class TokenizerChoice:
    """The settings of a tokenizer."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings."""
        for name, value in vars(self).items():
            if value is not None:
                flags.give(name, value)


_LIBRARIES = {
    "sentencepiece": "SentencePieceTokenizer",
    "huggingface": "HuggingFaceTokenizer",
    "tiktoken": "TikTokenizer",
}


def get_nmt_tokenizer(
    library: str = "sentencepiece",
    model_name: str | None = None,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merges_file: str | None = None,
    **further: object,
) -> TokenizerChoice:
    """Returns the tokenizer of a library: sentencepiece, huggingface, tiktoken, megatron (model_name
    "GPT2BPETokenizer") or null. Raises UserError for another one, and for other arguments."""
    given = [name for name, value in further.items() if value not in (None, False)]
    if given:
        raise UserError(
            f"get_nmt_tokenizer({', '.join(given)}): leave it out; tokenizers have the flags of --help data"
        )
    if library in _LIBRARIES:
        return TokenizerChoice(_LIBRARIES[library], tokenizer_model or vocab_file or model_name)
    if library == "megatron" and model_name in (None, "GPT2BPETokenizer"):
        return TokenizerChoice("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merges_file)
    if library == "null":
        raise UserError('get_nmt_tokenizer("null"): leave the tokenizer out and give the config a vocab_size')
    known = ", ".join((*_LIBRARIES, "megatron (GPT2BPETokenizer)"))
    raise UserError(f"get_nmt_tokenizer(library={library!r}, model_name={model_name!r}): give one of {known}")


def AutoTokenizer(pretrained_model_name: str, **further: object) -> TokenizerChoice:
    """Returns the tokenizer of a Hugging Face folder or tokenizer.json on this machine. Nothing is downloaded."""
    return get_nmt_tokenizer("huggingface", pretrained_model_name, **further)  # type: ignore[arg-type]
