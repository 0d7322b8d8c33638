"""T5 in the parity proof: an encoder that reads padded rows, and a decoder that writes shorter ones."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from parity.kind import Chunk, Kind
from parity.models import LENGTH, SEED, Model
from torch import Tensor, nn

from megatron.core.micro_batch import MicroBatch
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.core.tokens import RngPosition
from megatron.core.transformer.transformer_config import TransformerConfig

WRITTEN = LENGTH // 2
"""Tokens of the decoder's rows."""


@dataclass(frozen=True)
class T5Batch:
    """A micro-batch."""

    read: Tensor
    """The encoder's ids, int64 [b, s]."""
    written: Tensor
    """The decoder's ids, int64 [b, s of the decoder], as labels; the mask in float64."""
    labels: Tensor
    mask: Tensor
    hidden_keys: Tensor
    """Where the encoder's rows are padded: bool [b, 1, 1, s]."""
    random: RngPosition


def _build(model: Model, config: TransformerConfig, chunk: Chunk) -> nn.Module:
    encoder = copy.copy(config)
    encoder.num_layers = config.num_encoder_layers or 0
    return T5Model(
        config,
        encoder,
        get_t5_encoder_with_local_block_spec(encoder.num_layers),
        get_t5_decoder_with_local_block_spec(config.num_layers),
        model.vocabulary,
        LENGTH,
        pre_process=chunk.pre_process,
        post_process=chunk.post_process,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type=model.positions,  # type: ignore[arg-type]
        pg_collection=chunk.groups,
        **model.options,
    )


def _micro_batch(
    model: Model, step: int, first: int, part: tuple[int, int] = (0, 1), rows: int | None = None
) -> T5Batch:
    """The micro-batch whose first sample is number `first` of the step's global batch. The losses of samples 1, 4 and 5
    are masked altogether, others in places; rows are padded behind different numbers of tokens."""
    rows = rows or model.rows
    samples = [_sample(model, step, number) for number in range(first, first + rows)]
    read, text, mask, kept = (torch.stack([sample[i] for sample in samples]) for i in range(4))
    hidden_keys = (torch.arange(LENGTH) >= kept[:, None])[:, None, None]
    return T5Batch(read, text[:, :-1], text[:, 1:], mask, hidden_keys, RngPosition(SEED, step, first))


def _sample(model: Model, step: int, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The encoder's ids, the decoder's with one more, the mask, and how many of the encoder's are not padding."""
    generator = torch.Generator().manual_seed(100 * step + number + 1)
    read, text = (
        (torch.rand(length, generator=generator) ** 2 * model.vocabulary).long() for length in (LENGTH, WRITTEN + 1)
    )
    mask = (torch.rand(WRITTEN, generator=generator) < 0.3 + 0.2 * (number % 4)).double()
    if number in (1, 4, 5):
        mask.zero_()
    return read, text, mask, torch.tensor(LENGTH - 3 * (number % 4))


def _forward(chunk: nn.Module, batch: T5Batch, micro_batch: MicroBatch | None = None) -> Tensor:
    place = dataclasses.replace(micro_batch or MicroBatch(), rng_position=batch.random)
    keys = batch.hidden_keys
    output: Tensor = chunk(batch.read, batch.written, keys, None, keys, lm_labels=batch.labels, micro_batch=place)
    return output


def _loss(losses: Tensor, batch: T5Batch) -> tuple[Any, ...]:
    total, count = (losses * batch.mask.to(losses.dtype)).sum(), batch.mask.to(losses.dtype).sum()
    return total, count, torch.stack([total.detach(), count])


def _count(batch: T5Batch) -> Tensor:
    return batch.mask.sum()


def _shapes(model: Model, rows: int) -> dict[str, int]:
    return {"seq_length": LENGTH, "decoder_seq_length": WRITTEN, "micro_batch_size": rows}


T5 = Kind(_build, _micro_batch, _forward, _loss, _count, _shapes)
