"""The tokenizer, and the size of the vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag

_NO_CODE = "code in a tokenizer folder is never run"
_PADDING = "rows that pad the vocabulary are not part of the model; --make-vocab-size-divisible-by sets their number"
_TIKTOKEN = "tokenizer_type=TikTokenizer"
DEFAULT_SPECIAL_TOKENS = 1000
TIKTOKEN_ENCODING = "tiktoken:"
"""Begins a --tokenizer-model that names an encoding of the package tiktoken instead of a file."""
_HUGGING_FACE = "tokenizer_type=HuggingFaceTokenizer"
_NULL = "tokenizer_type=NullTokenizer"
_SENTENCEPIECE = "tokenizer_type=SentencePieceTokenizer"

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
SENTENCEPIECE_TYPES: tuple[TokenizerType, ...] = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
)
WORKING_TYPES: tuple[TokenizerType, ...] = (
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "TikTokenizer",
    *BERT_TYPES,
    *SENTENCEPIECE_TYPES,
    "SFTTokenizer",
)

_FILES: dict[str, str] = {
    "HuggingFaceTokenizer": "a tokenizer.json, or a folder with one",
    "SFTTokenizer": "a tokenizer.json, or a folder with one",
    "TikTokenizer": "a .json file, a file of base64 and ranks (Llama 3's tokenizer.model), or tiktoken:NAME",
    **dict.fromkeys(SENTENCEPIECE_TYPES, "a .model file of SentencePiece"),
}
"""What --tokenizer-model is for each family."""
_WITH_SENTINELS = (*BERT_TYPES, "HuggingFaceTokenizer")

_ANY_SENTENCEPIECE = f"tokenizer_type={'|'.join(SENTENCEPIECE_TYPES)}"
_WITH_OLDER_BEHAVIOUR = "tokenizer_type=TikTokenizer|HuggingFaceTokenizer|Llama2Tokenizer|SentencePieceTokenizer"


@dataclass(kw_only=True, frozen=True)
class TokenizerConfig:
    """Tokenizer family, its files and its options."""

    tokenizer_type: TokenizerType | None = flag(None, supported=[None, *WORKING_TYPES])
    """Family of the tokenizer: GPT2BPETokenizer (--vocab-file, --merge-file; the default); HuggingFaceTokenizer and
    SFTTokenizer (--tokenizer-model: a folder or tokenizer.json); TikTokenizer (a .json or .model file);
    SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer (a .model file); BertWordPieceLowerCase
    and BertWordPieceCase (--vocab-file); NullTokenizer (text consists of ids)."""

    vocab_file: str | None = flag(None, from_checkpoint=True)
    """Vocabulary file: a vocab.json for GPT2BPETokenizer, a vocab.txt for BertWordPieceLowerCase and
    BertWordPieceCase."""

    merge_file: str | None = flag(None, from_checkpoint=True)
    """Merges file (merges.txt) of GPT2BPETokenizer."""

    tokenizer_model: str | None = flag(None, from_checkpoint=True)
    """File or folder of HuggingFaceTokenizer, file of TikTokenizer and of the SentencePiece tokenizers. TikTokenizer:
    tiktoken:NAME is an encoding of the package tiktoken, such as tiktoken:cl100k_base, if its file is on this
    machine. NullTokenizer: folder of the tokenizer that made the ids; only exports to Hugging Face read it."""

    vocab_size: int | None = None
    """NullTokenizer: number of ids in the text; one more id ends a document. TikTokenizer: size of the vocabulary with
    special tokens; 131072 when not given. Other tokenizers know their size; give this only if the model's vocabulary is
    larger."""

    padded_vocab_size: int | None = flag(None, no_effect=_PADDING)
    """Size of the embedding; when not given, the vocabulary's size rounded up (--make-vocab-size-divisible-by)."""

    pad_vocab_size: bool = flag(
        True, off="--no-pad-vocab-size", aliases=["--disable-pad-vocab-size"], no_effect=_PADDING
    )
    """Round the vocabulary up when --padded-vocab-size is not given."""

    vocab_extra_ids: int = 0
    """BertWordPieceLowerCase, BertWordPieceCase, HuggingFaceTokenizer, and SentencePieceTokenizer with
    --tokenizer-sentencepiece-legacy: number of tokens <extra_id_i> to add to the vocabulary, for T5's masked spans. If
    a Hugging Face folder has such tokens, they keep their ids."""

    legacy_tokenizer: bool = flag(False, only_with=_WITH_OLDER_BEHAVIOUR)
    """Behave as in older releases: TikTokenizer matches no special tokens in text and names three of them;
    HuggingFaceTokenizer adds the special tokens of its template (BOS); Llama2Tokenizer begins each text with BOS;
    SentencePieceTokenizer adds special tokens (--tokenizer-sentencepiece-legacy)."""

    tokenizer_hf_include_special_tokens: bool = flag(
        False, off="--tokenizer-hf-no-include-special-tokens", only_with=_HUGGING_FACE
    )
    """HuggingFaceTokenizer: add the special tokens of its template to each text."""

    tokenizer_hf_use_fast: bool = flag(False, no_effect="HuggingFaceTokenizer always reads tokenizer.json")
    """HuggingFaceTokenizer: read tokenizer.json."""

    tokenizer_hf_no_use_fast: bool = flag(
        False, no_effect="HuggingFaceTokenizer always reads tokenizer.json, which gives the same ids"
    )
    """HuggingFaceTokenizer: read the files of the slow tokenizer."""

    trust_remote_code: bool = flag(False, no_effect=_NO_CODE)
    """Run the code in a tokenizer folder."""

    tokenizer_special_tokens: list[str] | None = flag(
        None, nargs="+", aliases=["--tiktoken-special-tokens"], only_with=_TIKTOKEN, from_checkpoint=True
    )
    """TikTokenizer: names of the first special tokens. One must end a document: </s>, or <|end_of_text|> or
    <|endoftext|> in a tokenizer.model."""

    tiktoken_pattern: Literal["v1", "v2"] | None = flag(None, only_with=_TIKTOKEN)
    """TikTokenizer: regular expression that splits text into words. Default: v2; Llama 3's for a tokenizer.model."""

    tiktoken_num_special_tokens: int = flag(DEFAULT_SPECIAL_TOKENS, only_with=_TIKTOKEN)
    """TikTokenizer: number of special tokens. In a .json file they have the lowest ids, in a tokenizer.model the
    highest; there 1000 stands for 256, as Llama 3 has."""

    null_tokenizer_eod_id: int | None = flag(None, only_with=_NULL)
    """NullTokenizer: id of the end-of-document token; --vocab-size when not given."""

    null_tokenizer_pad_id: int = flag(-1, only_with=_NULL)
    """NullTokenizer: id of the padding token; -1: none."""

    tokenizer_metadata: str | None = flag(
        None,
        no_effect="--tokenizer-type and --tokenizer-model say how a tokenizer is read; --chat-template, a template",
    )
    """JSON file that names the library and class of a tokenizer."""

    tokenizer_sentencepiece_legacy: bool = flag(False, only_with=_SENTENCEPIECE)
    """SentencePieceTokenizer: add <CLS>, <SEP>, <EOD>, <MASK> and missing <PAD>, <BOS>, <EOS> to the model's pieces,
    match them in text, and end documents with <EOD>."""

    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = flag(
        True,
        off="--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
        off_help="SentencePiece tokenizers: refuse a model that joins runs of blanks.",
        aliases=["--disable-tokenizer-sentencepiece-ignore-extra-whitespaces"],
        only_with=_ANY_SENTENCEPIECE,
    )
    """SentencePiece tokenizers: accept a model that joins runs of blanks. When this is off, such a model is refused."""

    use_gigatoken: bool = flag(False, no_effect="byte-level BPE is encoded by compiled loops anyway, with the same ids")
    """Encode text with a faster library."""

    chat_template: str | None = flag(None, only_with="tokenizer_type=SFTTokenizer", from_checkpoint=True)
    """SFTTokenizer: file with a Jinja template for conversations. Default: the template in the tokenizer's folder."""

    sft_tokenizer_prompt_format: Literal["default", "identity", "nemotron-h-aligned", "nemotron-nano-v2"] = flag(
        "default", only_with="tokenizer_type=SFTTokenizer"
    )
    """SFTTokenizer: how a conversation becomes text: default (by the chat template), identity (the contents of the
    turns, joined), or as these models write turns."""

    @property
    def family(self) -> str:
        """The tokenizer's type, given or by default."""
        return self.tokenizer_type or "GPT2BPETokenizer"

    @property
    def files(self) -> tuple[str, ...]:
        """The fields that name files which the tokenizer reads."""
        names_encoding = self.family == "TikTokenizer" and (self.tokenizer_model or "").startswith(TIKTOKEN_ENCODING)
        return () if names_encoding else self.fields_read

    @property
    def fields_read(self) -> tuple[str, ...]:
        """The fields that name what the tokenizer reads."""
        if self.family == "GPT2BPETokenizer":
            return "vocab_file", "merge_file"
        if self.family in BERT_TYPES:
            return ("vocab_file",)
        return ("tokenizer_model",) if self.family in _FILES else ()

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a SentencePieceTokenizer has more tokens than its model."""
        return self.family == "SentencePieceTokenizer" and (
            self.tokenizer_sentencepiece_legacy or self.legacy_tokenizer
        )

    def model_vocab_size(self, ids: int) -> int:
        """Returns the vocabulary size, without padding, of a model whose tokenizer has `ids` ids."""
        return ids if self.family == "NullTokenizer" else max(ids, self.vocab_size or 0)

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`. Reads no file."""
        family = self.family
        if family == "GPT2BPETokenizer":
            if self.vocab_file is None or self.merge_file is None:
                also = "" if self.tokenizer_model is None else ", not {tokenizer_model}"
                other = "; {tokenizer_type:name} selects another tokenizer" if self.tokenizer_type is None else ""
                yield f"{{vocab_file:name}} and {{merge_file:name}}: GPT2BPETokenizer needs both{also}{other}"
        elif family in _FILES:
            if self.tokenizer_model is None:
                yield f"{{tokenizer_model:name}}: {family} needs {_FILES[family]}"
        elif family == "NullTokenizer":
            yield from self._null_problems()
        elif family in BERT_TYPES and self.vocab_file is None:
            yield f"{{vocab_file:name}}: {family} needs a vocab.txt, one token per line"
        if self.vocab_extra_ids < 0:
            yield "{vocab_extra_ids}: must be at least 0"
        elif self.vocab_extra_ids and family not in _WITH_SENTINELS and not self.adds_special_tokens:
            legacy = " without {tokenizer_sentencepiece_legacy:name}" if family == "SentencePieceTokenizer" else ""
            others = ", ".join(_WITH_SENTINELS[:-1])
            yield f"{{vocab_extra_ids}}: {family} has no extra ids{legacy}; {others} and {_WITH_SENTINELS[-1]} have"
        if self.tiktoken_num_special_tokens < 1:
            yield "{tiktoken_num_special_tokens}: must be at least 1"

    def _null_problems(self) -> Iterator[str]:
        size, eod, pad = self.vocab_size, self.null_tokenizer_eod_id, self.null_tokenizer_pad_id
        if size is None:
            yield "{vocab_size:name}: NullTokenizer needs it"
        elif size < 1:
            yield "{vocab_size}: must be at least 1"
        else:
            if eod is not None and not 0 <= eod <= size:
                yield "{null_tokenizer_eod_id}: must be from 0 to {vocab_size}"
            if not -1 <= pad <= size:
                yield "{null_tokenizer_pad_id}: must be -1 (none) or from 0 to {vocab_size}"
