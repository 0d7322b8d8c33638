"""T5 datasets: masked spans, replaced by sentinels, and the decoder's text that fills them (Raffel et al. 2020)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.utils.warn import warn_on_first_rank
from megatron.data.datasets.masked_dataset import (
    MaskedWordPieceDataset,
    MaskedWordPieceDatasetConfig,
    padded,
    tokenizer_name,
)
from megatron.data.datasets.masking import draw_spans, words_of

_TOKENS = {"bos": "[BOS]", "eos": "[EOS]", "pad": "[PAD]"}
_HUGGING_FACE = (
    '. Hugging Face\'s T5 begins the decoder\'s text with its padding token, which "bos_token": "<pad>" in '
    "tokenizer_config.json says"
)
_NO_LABEL = -1


@dataclass
class T5MaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """The data of a T5 run."""

    sequence_length_encoder: int | None = None
    """Tokens of the encoder's input. Always equal to `sequence_length`."""

    sequence_length_decoder: int | None = None
    """Tokens of the decoder's input. Required."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sequence_length_encoder = self.sequence_length
        self.refuse_missing(["sequence_length_decoder"])
        self.refuse_tokenizer_without(_TOKENS, "T5", _HUGGING_FACE)
        if self.max_tokens < 2:
            raise UserError(
                f"--encoder-seq-length {self.sequence_length}: a sample of T5 has at least two tokens; give 4 or more"
            )
        self.refuse_no_masks()
        self._check_decoder_length()
        self._check_sentinels()

    def _check_decoder_length(self) -> None:
        """Refuses a decoder length that is too short even for the smallest number of spans."""
        assert self.sequence_length_decoder is not None
        if self.sequence_length_decoder < self.most_masked + self._fewest_spans + 1:
            raise UserError(
                f"--decoder-seq-length {self.sequence_length_decoder}: too short for --encoder-seq-length "
                f"{self.sequence_length} with --mask-prob {self.masking_probability}, which masks {self.most_masked} "
                f"tokens of a sample; {2 * self.most_masked + 1} are always enough"
            )

    def _check_sentinels(self) -> None:
        """Refuses a tokenizer with too few sentinels for the smallest number of spans, and warns if it has too few for
        the largest number."""
        if len(self.sentinels) < self._fewest_spans:
            raise UserError(
                f"--vocab-extra-ids: --tokenizer-type {tokenizer_name(self.tokenizer)} has {len(self.sentinels)} "
                f"sentinels <extra_id_i>; T5 needs one for each masked span of a sample, and {self.most_masked} are "
                f"always enough for --encoder-seq-length {self.sequence_length} with --mask-prob "
                f"{self.masking_probability}"
            )
        if len(self.sentinels) < self.most_masked:
            warn_on_first_rank(
                f"--vocab-extra-ids: the tokenizer has {len(self.sentinels)} sentinels <extra_id_i>, and a sample with "
                f"more masked spans ends the run; {self.most_masked} are always enough"
            )

    @property
    def most_masked(self) -> int:
        """Largest number of masked tokens, and so of spans, in a sample."""
        return int(self.masking_rule.count(self.max_tokens, self.max_tokens))

    @property
    def _fewest_spans(self) -> int:
        assert self.masking_max_ngram is not None
        return -(-self.most_masked // self.masking_max_ngram)

    @property
    def sentinels(self) -> list[int]:
        """Ids of the tokens that replace spans, in their order."""
        return list(getattr(self.tokenizer, "additional_special_tokens_ids", None) or [])

    @property
    def max_tokens(self) -> int:
        """Most tokens of text in a sample: the length without two special tokens."""
        return self.sequence_length - 2

    @property
    def min_sentences(self) -> int:
        """Fewest sentences of a sample."""
        return 1


class T5MaskedWordPieceDataset(MaskedWordPieceDataset):
    """Samples of T5: the encoder reads text whose masked spans are replaced by sentinels, and the decoder writes each
    sentinel and the tokens that it stands for.

    Item `i`, all int64, with s tokens for the encoder and d for the decoder: `text_enc` [s]; `text_dec` [d], which
    begins with BOS; `labels` [d], the same shifted by one, which end with EOS, then -1; `loss_mask` [d], 0 at padding;
    `enc_mask` [s] and `dec_mask` [d], 0 at padding; `truncated` [], 1 if tokens were cut off; `sample_id` [] (= i).
    Item None is sample 0 without loss and with sample_id -1; it fills up a batch.
    """

    config: T5MaskedWordPieceDatasetConfig

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        number = 0 if idx is None else idx
        sentences, target = self.read_sentences(number)
        random = self.random_of(number)
        whole = np.concatenate(sentences).astype(np.int64)
        tokens = whole[:target]
        words = words_of(self._continues[tokens], np.zeros(len(tokens), np.bool_))
        spans = sorted(draw_spans(words, self._rule.count(len(tokens), target), self._rule, random))
        encoder, decoder = self._replace_spans(tokens, spans, number)
        return self._fields(idx, encoder, decoder, truncated=len(whole) > target)

    @property
    def _room(self) -> int:
        """Tokens of the decoder's text, BOS or EOS included."""
        assert self.config.sequence_length_decoder is not None
        return self.config.sequence_length_decoder

    def _replace_spans(self, tokens: np.ndarray, spans: list[list[int]], idx: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the encoder's text, and the decoder's without BOS and EOS."""
        sentinels = self.config.sentinels
        if len(spans) > len(sentinels):
            raise UserError(
                f"--vocab-extra-ids: sample {idx} of {self._label()} has {len(spans)} masked spans, and the tokenizer "
                f"has {len(sentinels)} sentinels; {self.config.most_masked} are always enough"
            )
        encoder: list[Any] = []
        decoder: list[Any] = []
        position = 0
        for sentinel, span in zip(sentinels, spans, strict=False):
            encoder += [tokens[position : span[0]], [sentinel]]
            decoder += [[sentinel], tokens[span[0] : span[-1] + 1]]
            position = span[-1] + 1
        encoder.append(tokens[position:])
        output = np.concatenate([np.empty(0, np.int64), *decoder])
        if len(output) >= self._room:
            raise UserError(
                f"--decoder-seq-length {self._room}: sample {idx} of {self._label()} needs {len(output) + 1} tokens; "
                f"{2 * self.config.most_masked + 1} are always enough"
            )
        return np.concatenate(encoder), output

    def _fields(self, idx: int | None, encoder: np.ndarray, decoder: np.ndarray, truncated: bool) -> dict[str, Tensor]:
        tokenizer = self.config.tokenizer
        length, room, pad = self.config.sequence_length, self._room, tokenizer.pad
        inputs, outputs = np.append(tokenizer.bos, decoder), np.append(decoder, tokenizer.eos)
        filled = {
            "text_enc": padded(encoder, length, pad),
            "text_dec": padded(inputs, room, pad),
            "labels": padded(outputs, room, _NO_LABEL),
            "loss_mask": padded(np.ones(len(inputs)), room, 0),
            "enc_mask": padded(np.ones(len(encoder)), length, 0),
            "dec_mask": padded(np.ones(len(inputs)), room, 0),
        }
        if idx is None:
            filled["loss_mask"][:] = 0
        tensors = {name: torch.from_numpy(array) for name, array in filled.items()}
        numbers = {"truncated": int(truncated), "sample_id": -1 if idx is None else idx}
        return tensors | {name: torch.tensor(number) for name, number in numbers.items()}

    @staticmethod
    def config_attention_mask(
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        encoder_mask: Tensor,
        decoder_mask: Tensor,
        use_local: bool = False,
        test_te_version: object = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | tuple[Tensor, Tensor]]:
        """Returns the attention masks of encoder, decoder and cross attention, True where attention is masked.

        `encoder_mask` [b, s] and `decoder_mask` [b, d] are True at padding. With `use_local`, the masks have the shapes
        [b, 1, s, s], [b, 1, d, d] and [b, 1, d, s]. Otherwise they are those of Transformer Engine: the encoder's
        padding [b, 1, 1, s]; None, since the decoder's is causal; the padding [b, 1, 1, d] of the queries and [b, 1, 1,
        s] of the keys. Tokens are not read. `test_te_version` has no effect.
        """
        encoder_keys, decoder_keys = encoder_mask.bool()[:, None, None, :], decoder_mask.bool()[:, None, None, :]
        if not use_local:
            return encoder_keys, None, (decoder_keys, encoder_keys)
        source, target = encoder_mask.shape[1], decoder_mask.shape[1]
        later = torch.ones(target, target, dtype=torch.bool, device=decoder_mask.device).triu(1)
        encoder = encoder_keys.expand(-1, -1, source, -1)
        return encoder, decoder_keys | later, encoder_keys.expand(-1, -1, target, -1)
