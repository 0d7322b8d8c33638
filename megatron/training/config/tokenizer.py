"""Text to ids, and the size of the vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_yet

_NO_CODE = "no code of a tokenizer folder is ever run"
_PADDING = "rows that pad the vocabulary take no part in the model; --make-vocab-size-divisible-by says how many"
_PRETRAINING = "pretraining reads text as it is"
_TIKTOKEN = "tokenizer_type=TikTokenizer"
_HUGGING_FACE = "tokenizer_type=HuggingFaceTokenizer"
_NULL = "tokenizer_type=NullTokenizer"

TokenizerType = Literal[
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "MultimodalTokenizer",
    "NullTokenizer",
    "NullMultimodalTokenizer",
    "SFTTokenizer",
]
BERT_TYPES: tuple[TokenizerType, ...] = ("BertWordPieceLowerCase", "BertWordPieceCase")
WORKING_TYPES: tuple[TokenizerType, ...] = (
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "TikTokenizer",
    *BERT_TYPES,
)


@dataclass(kw_only=True, frozen=True)
class TokenizerConfig:
    """Tokenizer."""

    tokenizer_type: TokenizerType | None = flag(None, supported=[None, *WORKING_TYPES])
    """Family of the tokenizer: GPT2BPETokenizer (--vocab-file, --merge-file), HuggingFaceTokenizer (--tokenizer-model:
    a folder with a tokenizer.json, or such a file), TikTokenizer (--tokenizer-model: a .json file),
    BertWordPieceLowerCase and BertWordPieceCase (--vocab-file), NullTokenizer (--vocab-size: text is ids).
    GPT2BPETokenizer when not given. All files are local."""

    vocab_file: str | None = None
    """File of the vocabulary: a vocab.json for GPT2BPETokenizer, a vocab.txt for BertWordPieceLowerCase and
    BertWordPieceCase."""

    merge_file: str | None = None
    """File of the merges of a byte-level BPE: a merges.txt."""

    tokenizer_model: str | None = None
    """Folder or file of a tokenizer that is not given by --vocab-file and --merge-file."""

    vocab_size: int | None = None
    """NullTokenizer: ids of the text; one more ends a document. TikTokenizer: size of the vocabulary, special tokens
    included; 131072 when not given. Other tokenizers know their size; the model may have more entries than that, as
    models of others do, and then this is their number."""

    padded_vocab_size: int | None = flag(None, no_effect=_PADDING)
    """Size of the embedding; when not given, the vocabulary's size rounded up (--make-vocab-size-divisible-by)."""

    pad_vocab_size: bool = flag(
        True, off="--no-pad-vocab-size", aliases=["--disable-pad-vocab-size"], no_effect=_PADDING
    )
    """Round the vocabulary up when --padded-vocab-size is not given."""

    vocab_extra_ids: int = 0
    """BertWordPieceLowerCase and BertWordPieceCase: tokens <extra_id_i> to add to the vocabulary, for masked spans of
    T5."""

    legacy_tokenizer: bool = False
    """The way of older releases: TikTokenizer matches no special tokens in text and names three of them,
    HuggingFaceTokenizer adds those of its template (BOS)."""

    tokenizer_hf_include_special_tokens: bool = flag(
        False, off="--tokenizer-hf-no-include-special-tokens", only_with=_HUGGING_FACE
    )
    """HuggingFaceTokenizer: add the special tokens of its template to each text."""

    tokenizer_hf_use_fast: bool = flag(False, no_effect="tokenizer.json is always what is read")
    """HuggingFaceTokenizer: read tokenizer.json."""

    tokenizer_hf_no_use_fast: bool = not_yet(False)
    """HuggingFaceTokenizer: read the files of the slow tokenizer."""

    trust_remote_code: bool = flag(False, no_effect=_NO_CODE)
    """Run code that a tokenizer folder brings."""

    tokenizer_special_tokens: list[str] | None = flag(
        None, nargs="+", aliases=["--tiktoken-special-tokens"], only_with=_TIKTOKEN
    )
    """TikTokenizer: names of the first special tokens, </s> among them."""

    tiktoken_pattern: Literal["v1", "v2"] | None = flag(None, only_with=_TIKTOKEN)
    """TikTokenizer: how text is cut into words; v2 when not given."""

    tiktoken_num_special_tokens: int = flag(1000, only_with=_TIKTOKEN)
    """TikTokenizer: number of special tokens, which have the first ids."""

    null_tokenizer_eod_id: int | None = flag(None, only_with=_NULL)
    """NullTokenizer: the id that ends a document; --vocab-size when not given."""

    null_tokenizer_pad_id: int = flag(-1, only_with=_NULL)
    """NullTokenizer: the id that fills up short sequences; -1: none."""

    tokenizer_metadata: str | None = not_yet(None)
    """JSON file that names the library and class of a tokenizer."""

    tokenizer_sentencepiece_legacy: bool = not_yet(False)
    """SentencePiece tokenizers: add special tokens to the model's pieces and match them in text."""

    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = flag(
        True,
        off="--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
        aliases=["--disable-tokenizer-sentencepiece-ignore-extra-whitespaces"],
        no_effect="no SentencePiece tokenizer is there yet",
    )
    """SentencePiece tokenizers: leave runs of blanks to the model."""

    use_gigatoken: bool = flag(False, no_effect="byte-level BPE is encoded by compiled loops anyway, with the same ids")
    """Encode with a faster library."""

    chat_template: str | None = flag(None, no_effect=_PRETRAINING)
    """Template for conversations."""

    @property
    def family(self) -> str:
        """The tokenizer's type, given or by default."""
        return self.tokenizer_type or "GPT2BPETokenizer"

    def model_vocab_size(self, ids: int) -> int:
        """Entries of the vocabulary of a model whose tokenizer has so many ids."""
        return ids if self.family == "NullTokenizer" else max(ids, self.vocab_size or 0)


def tokenizer_problems(config: TokenizerConfig) -> Iterator[str]:
    """What is wrong between these values, before any file is read; a sentence each, `{field}` standing for a flag."""
    family = config.family
    if family == "GPT2BPETokenizer":
        if config.vocab_file is None or config.merge_file is None:
            also = "" if config.tokenizer_model is None else ", not {tokenizer_model}"
            yield f"{{vocab_file:name}} and {{merge_file:name}}: GPT2BPETokenizer needs both{also}"
    elif family in ("HuggingFaceTokenizer", "TikTokenizer"):
        what = "a folder with a tokenizer.json, or such a file" if family == "HuggingFaceTokenizer" else "a .json file"
        if config.tokenizer_model is None:
            yield f"{{tokenizer_model:name}}: {family} needs {what}"
    elif family == "NullTokenizer":
        yield from _null_problems(config)
    elif family in BERT_TYPES and config.vocab_file is None:
        yield f"{{vocab_file:name}}: {family} needs a vocab.txt, one token a line"
    if config.vocab_extra_ids < 0:
        yield "{vocab_extra_ids}: must be at least 0"
    elif config.vocab_extra_ids and family not in BERT_TYPES:
        yield f"{{vocab_extra_ids}}: {family} takes no more tokens; {' and '.join(BERT_TYPES)} do"
    if config.tiktoken_num_special_tokens < 1:
        yield "{tiktoken_num_special_tokens}: must be at least 1"


def _null_problems(config: TokenizerConfig) -> Iterator[str]:
    if config.vocab_size is None:
        yield "{vocab_size:name}: NullTokenizer needs it"
    elif config.vocab_size < 1:
        yield "{vocab_size}: must be at least 1"
    else:
        if config.null_tokenizer_eod_id is not None and not 0 <= config.null_tokenizer_eod_id <= config.vocab_size:
            yield "{null_tokenizer_eod_id}: must be from 0 to {vocab_size}"
        if not -1 <= config.null_tokenizer_pad_id <= config.vocab_size:
            yield "{null_tokenizer_pad_id}: must be -1 (none) or from 0 to {vocab_size}"
