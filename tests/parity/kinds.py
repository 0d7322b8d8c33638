"""The architectures of the parity proof. A new one is one more entry of `KINDS`, and models with its name as their
`kind`."""

import dataclasses
from typing import Any
from unittest import mock

import torch
from parity.bert import BERT
from parity.kind import Chunk, Kind
from parity.models import LENGTH, Model, randomize_constants, starve
from parity.t5 import T5
from parity.text import TextBatch, micro_batch
from torch import Tensor, nn

from megatron.core import initializers
from megatron.core.counter_rng import standard_normal
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig


def kind_of(model: Model) -> Kind:
    return KINDS[model.kind]


def build_model(model: Model, config: TransformerConfig, chunk: Chunk | None = None) -> nn.Module:
    """The model, or one chunk of it."""
    with mock.patch.object(initializers, "standard_normal", _drawn_once):
        built = kind_of(model).build(model, config, chunk or Chunk())
        randomize_constants(built)
    starve(built, model.starved)
    return built


_drawn: dict[tuple[tuple[int, int], bytes], Tensor] = {}


def _drawn_once(index: Tensor, key: tuple[int, int]) -> Tensor:
    """`standard_normal`, a function of its arguments alone. Layouts of a model call it with the same ones again."""
    place = (key, index.cpu().numpy().tobytes())
    if place not in _drawn:
        _drawn[place] = standard_normal(index, key)
    return _drawn[place].to(index.device)


def on_device(value: Any, device: torch.device) -> Any:
    """Copies a micro-batch and moves its tensors to the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    moved = {f.name: on_device(getattr(value, f.name), device) for f in dataclasses.fields(value)}
    return dataclasses.replace(value, **moved)


# GPT
# ---------------------------------------------------------------------------------------------------------------------


def _build_gpt(model: Model, config: TransformerConfig, chunk: Chunk) -> nn.Module:
    place = {"vp_stage": chunk.vp_stage, "pp_rank": chunk.groups.rank("pp") if chunk.groups is not None else 0}
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **place)
    return GPTModel(
        config,
        layers,
        model.vocabulary,
        LENGTH,
        pre_process=chunk.pre_process,
        post_process=chunk.post_process,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type=model.positions,  # type: ignore[arg-type]
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, **place),
        pg_collection=chunk.groups,
        vp_stage=chunk.vp_stage,
        **model.options,
    )


def _forward_gpt(chunk: nn.Module, batch: TextBatch, **more: Any) -> Tensor:
    inputs = (batch.ids, batch.tokens.positions, None)
    losses: Tensor = chunk(*inputs, labels=batch.labels, loss_mask=batch.mask, tokens=batch.tokens, **more)
    return losses


def _loss_per_token(losses: Tensor, batch: TextBatch) -> tuple[Tensor, Tensor, Tensor]:
    mask = batch.mask.to(losses.dtype)
    total, count = (losses * mask).sum(), mask.sum()
    return total, count, torch.stack([total.detach(), count])


def _shapes_gpt(model: Model, rows: int) -> dict[str, int]:
    packed = rows if model.packed else 1
    return {"seq_length": LENGTH * packed, "micro_batch_size": rows // packed}


def _count(batch: TextBatch) -> Tensor:
    return batch.mask.sum()


KINDS = {
    "gpt": Kind(_build_gpt, micro_batch, _forward_gpt, _loss_per_token, _count, _shapes_gpt),
    "bert": BERT,
    "t5": T5,
}
