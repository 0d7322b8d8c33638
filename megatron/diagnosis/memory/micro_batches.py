"""Micro-batches without values, of the shapes that a run's loaders deliver."""

from collections.abc import Iterator

import torch

from megatron.core.context_parallel.regrouping import fewest_ranks
from megatron.core.tokens import RngPosition
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import Batch, BatchRecord
from megatron.training.data.masked_data import BertBatch, T5Batch

TOKENS_OF_DOCUMENT = 1024
"""Assumed mean length of a packed document. Only the boundaries depend on it, a few kilobytes."""


class ShapeOnlyData(Iterator[BatchRecord]):
    """Yields micro-batches on the meta device, in place of `StepData`."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        self.iteration = 0
        self.rng_position = RngPosition(config.seed, 0)

    def __next__(self) -> BatchRecord:
        """Returns the next micro-batch of a GPT, BERT or T5 run."""
        config = self.config
        rows, length = config.training.micro_batch_size, config.data.seq_length
        assert length is not None
        if config.model.model_family == "bert":
            return _bert_batch(rows, length)
        if config.model.model_family == "t5":
            return _t5_batch(rows, length, config.data.decoder_seq_length or length)
        return _gpt_batch(config, rows, length)


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _gpt_batch(config: PretrainConfig, rows: int, length: int) -> Batch:
    packed = config.data.reset_attention_mask or config.training.sft
    ranks = None
    if config.transformer.hybrid_context_parallel:
        # The most that a rank computes: the longest row on as many ranks as it needs, each with as much as has room.
        each = config.transformer.max_seqlen_per_dp_cp_rank or 1
        rows, ranks = 1, fewest_ranks(length, each)
        length = ranks * each
    documents = max(rows * length // TOKENS_OF_DOCUMENT, rows)
    return Batch(
        tokens=_integers(rows, length),
        labels=_integers(rows, length),
        loss_mask=torch.empty(rows, length, device="meta"),
        position_ids=_integers(rows, length),
        cu_seqlens=torch.empty(documents + 1, dtype=torch.int32, device="meta") if packed else None,
        max_seqlen=length if packed else None,
        sample_ids=torch.zeros(rows, dtype=torch.int64),
        local_cp_size=ranks,
    )


def _bert_batch(rows: int, length: int) -> BertBatch:
    names = ("text", "types", "labels", "loss_mask", "padding_mask")
    each = {name: _integers(rows) for name in ("is_random", "truncated")}
    ids = torch.zeros(rows, dtype=torch.int64)
    return BertBatch(**{name: _integers(rows, length) for name in names}, **each, sample_ids=ids)


def _t5_batch(rows: int, length: int, written: int) -> T5Batch:
    read = {name: _integers(rows, length) for name in ("text_enc", "enc_mask")}
    made = {name: _integers(rows, written) for name in ("text_dec", "labels", "loss_mask", "dec_mask")}
    return T5Batch(**read, **made, truncated=_integers(rows), sample_ids=torch.zeros(rows, dtype=torch.int64))
