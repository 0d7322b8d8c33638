"""BERT in the parity proof: padded pairs of segments with masked tokens, and the sum of two mean losses."""

from dataclasses import dataclass
from typing import Any

import torch
from parity.kind import Chunk, Kind
from parity.models import LENGTH, SEED, Model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megatron.core.models.bert.bert_layer_specs import get_bert_encoder_block_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.tokens import RngPosition, Tokens
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class BertText:
    """A micro-batch: tensors [b, s], int64."""

    ids: Tensor
    types: Tensor
    labels: Tensor
    """-1 where nothing is masked."""
    mask: Tensor
    """Loss mask: 1 for masked tokens, otherwise 0, in float64."""
    real: Tensor
    """0 where a row is padded."""
    swapped: Tensor
    """[b]"""
    tokens: Tokens


def _micro_batch(model: Model, step: int, first: int, part: tuple[int, int], rows: int | None) -> BertText:
    """The micro-batch whose first sample is number `first` of the step's global batch.

    Samples differ in length; samples 1, 4 and 5 have no masked token, so there are micro-batches without one.
    """
    assert part == (0, 1), "rows of BERT are not cut"
    rows = rows or model.rows
    samples = [_sample(model, step, number) for number in range(first, first + rows)]
    ids, types, labels, real, swapped = (torch.stack([sample[i] for sample in samples]) for i in range(5))
    tokens = Tokens(LENGTH, rows, random=RngPosition(SEED, step, first))
    return BertText(ids, types, labels, (labels >= 0).double(), real, swapped, tokens)


def _sample(model: Model, step: int, number: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(100 * step + number + 1)
    # Small ids are frequent, so that there is something to learn within a few steps.
    text = (torch.rand(LENGTH, generator=generator) ** 2 * model.vocabulary).long()
    place = torch.arange(LENGTH)
    length = LENGTH - (0, 3, 11, 0, 1, 7, 5, 2)[number % 8]
    swapped = torch.randint(2, (), generator=generator)
    types = (place >= length // 2).long() if model.options["num_tokentypes"] else torch.zeros_like(place)
    text = torch.where(types == swapped, text, model.vocabulary - 1 - text)  # the order can be told
    chosen = (torch.rand(LENGTH, generator=generator) < 0.4) & (place > 0) & (place < length)
    if number in (1, 4, 5):
        chosen &= False
    real = (place < length).long()
    return torch.where(chosen, 1, text) * real, types * real, torch.where(chosen, text, -1), real, swapped


def _build(model: Model, config: TransformerConfig, chunk: Chunk) -> nn.Module:
    rank = chunk.groups.rank("pp") if chunk.groups is not None else 0
    return BertModel(
        config,
        transformer_layer_spec=get_bert_encoder_block_spec(config, chunk.vp_stage, rank),
        vocab_size=model.vocabulary,
        max_sequence_length=LENGTH,
        pre_process=chunk.pre_process,
        post_process=chunk.post_process,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type=model.positions,  # type: ignore[arg-type]
        vp_stage=chunk.vp_stage,
        pg_collection=chunk.groups,
        **model.options,
    )


def _forward(chunk: nn.Module, batch: BertText, **more: Any) -> Any:
    return chunk(batch.ids, batch.real, batch.types, lm_labels=batch.labels, tokens=batch.tokens, **more)


def _loss(output: tuple[Tensor, Tensor | None], batch: BertText) -> tuple[Any, ...]:
    """With a binary head the mean over masked tokens and the mean over rows; without, the sum over masked tokens."""
    losses, in_order = output
    mask = batch.mask.to(losses.dtype)
    total, count = (losses * mask).sum(), mask.sum()
    if in_order is None:
        return total, count, torch.stack([total.detach(), count])
    mean = total / count.clamp(min=1) + cross_entropy(in_order.to(losses.dtype), batch.swapped)
    return mean, torch.stack([mean.detach(), torch.ones_like(mean)])


def _count(batch: BertText) -> Tensor:
    return batch.mask.sum()


def _shapes(model: Model, rows: int) -> dict[str, int]:
    return {"seq_length": LENGTH, "micro_batch_size": rows}


BERT = Kind(_build, _micro_batch, _forward, _loss, _count, _shapes)
