"""The data of BERT and T5 runs: the configs of their data sets from the flags, and their batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.data.datasets.bert_dataset import BERTMaskedWordPieceDatasetConfig
from megatron.data.datasets.t5_dataset import T5MaskedWordPieceDatasetConfig
from megatron.data.tokenizer.base import Tokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import BatchRecord, stack_items
from megatron.training.data.sources import masked_fields


def bert_dataset_config(config: PretrainConfig, tokenizer: Tokenizer) -> BERTMaskedWordPieceDatasetConfig:
    """Returns the config of the run's data sets. Raises UserError if the tokenizer lacks a special token
    of BERT."""
    return BERTMaskedWordPieceDatasetConfig(
        **masked_fields(config, tokenizer),
        masking_max_ngram=3,
        masking_use_geometric_distribution=False,
        classification_head=config.model.bert_binary_head,
    )


@dataclass(frozen=True)
class BertBatch(BatchRecord):
    """b samples of s tokens, all int64, with the names of BERTMaskedWordPieceDataset's items."""

    text: Tensor
    """[b, s]: tokens, masked ones replaced."""
    types: Tensor
    """[b, s]: segment of each token, 0 or 1."""
    labels: Tensor
    """[b, s]: the token that was masked; -1 elsewhere."""
    is_random: Tensor
    """[b]: 1 if the segments are swapped, otherwise 0; -1 for rows that only fill up the batch."""
    loss_mask: Tensor
    """[b, s]: 1 where a token was masked, otherwise 0."""
    padding_mask: Tensor
    """[b, s]: 1 for tokens, 0 for padding."""
    truncated: Tensor
    """[b]: 1 if tokens were cut off, otherwise 0."""
    sample_ids: Tensor
    """[b], always on the host: ids of the samples in the dataset; -1 for rows that only fill up the batch."""


def collate_bert(items: Sequence[Mapping[str, Any]]) -> BertBatch:
    """Returns the batch of some items of a BERT dataset."""
    names = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask", "truncated")
    return BertBatch(**stack_items(items, names))


def t5_dataset_config(config: PretrainConfig, tokenizer: Tokenizer) -> T5MaskedWordPieceDatasetConfig:
    """Returns the config of the run's data sets. Raises UserError if the tokenizer lacks a special token
    of T5 or has too few sentinels."""
    return T5MaskedWordPieceDatasetConfig(
        **masked_fields(config, tokenizer),
        masking_max_ngram=10,
        masking_use_geometric_distribution=True,
        sequence_length_decoder=config.data.decoder_seq_length,
    )


@dataclass(frozen=True)
class T5Batch(BatchRecord):
    """b samples of s tokens for the encoder and d for the decoder, all int64, with the names of
    T5MaskedWordPieceDataset's items."""

    text_enc: Tensor
    """[b, s]: the encoder's tokens."""
    text_dec: Tensor
    """[b, d]: the decoder's tokens."""
    labels: Tensor
    """[b, d]: the token to predict at each position of the decoder; -1 at padding."""
    loss_mask: Tensor
    """[b, d]: 1 where a token is predicted, 0 at padding."""
    enc_mask: Tensor
    """[b, s]: 1 for tokens, 0 for padding."""
    dec_mask: Tensor
    """[b, d]: 1 for tokens, 0 for padding."""
    truncated: Tensor
    """[b]: 1 if tokens were cut off, otherwise 0."""
    sample_ids: Tensor
    """[b], always on the host: ids of the samples in the dataset; -1 for rows that only fill up the batch."""

    @property
    def enc_dec_mask(self) -> Tensor:
        """[b, s]: the encoder's tokens that the decoder may read, for scripts of releases up to 0.9."""
        return self.enc_mask


def collate_t5(items: Sequence[Mapping[str, Any]]) -> T5Batch:
    """Returns the batch of some items of a T5 dataset."""
    names = ("text_enc", "text_dec", "labels", "loss_mask", "enc_mask", "dec_mask", "truncated")
    return T5Batch(**stack_items(items, names))
