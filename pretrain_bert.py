"""Pretrains BERT:   torchrun --nproc_per_node 8 pretrain_bert.py --num-layers 24 --data-path corpus_text_sentence ...

This file has the providers of the run: model, data, loss. `python pretrain_bert.py --help` lists the flags; plain
`python` runs one process. The data is split into sentences (tools/preprocess_data.py --split-sentences).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly
    from megatron.launcher import end_with_launcher
    from megatron.siblings import notice_siblings

    exit_quietly()
    end_with_launcher()
    notice_siblings()

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megatron.core.models.bert.bert_layer_specs import get_bert_encoder_block_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.tokens import Tokens
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, block_spec_of_flag
from megatron.data.datasets.bert_dataset import BERTMaskedWordPieceDataset
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.facades.pretrain import pretrain
from megatron.training.data.masked_data import BertBatch, bert_dataset_config
from megatron.training.data.step_data import StepData
from megatron.training.providers import Context, ForwardStep, LossFunction, Providers, SampleCounts, Stage

DEFAULTS = {"model_family": "bert", "tokenizer_type": "BertWordPieceLowerCase"}
"""Defaults of flags in this script."""


def build_layer_specs(context: Context, stage: Stage) -> TransformerBlockSubmodules:
    """Returns the specs of a stage's layers: those of --spec, or else by the flags."""
    model, pipeline_rank = context.config.model, context.environment.groups.rank("pp")
    if model.spec is not None and model.spec != ["local"]:
        return block_spec_of_flag(model.spec, model.transformer, stage.virtual, pipeline_rank)
    return get_bert_encoder_block_spec(model.transformer, stage.virtual, pipeline_rank)


def build_model(context: Context, stage: Stage) -> BertModel:
    """Builds the part of the model that a stage holds."""
    model, groups = context.config.model, context.environment.groups
    return BertModel(
        config=model.transformer,
        num_tokentypes=model.num_tokentypes,
        transformer_layer_spec=build_layer_specs(context, stage),
        vocab_size=context.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=stage.pre_process,
        post_process=stage.post_process,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        add_binary_head=model.bert_binary_head,
        head_activation=model.bert_head_activation,
        head_bias=model.bert_head_bias,
        vocab_padding_multiple=model.make_vocab_size_divisible_by * model.transformer.tensor_model_parallel_size,
        pg_collection=groups,
        vp_stage=stage.virtual,
    )


def build_datasets(context: Context, counts: SampleCounts) -> Sequence[Any]:
    """Builds the datasets of the train, valid and test split from --data-path and --split."""
    config = bert_dataset_config(context.config, context.tokenizer)
    sizes = [counts.train, counts.valid, counts.test]
    return BlendedMegatronDatasetBuilder(BERTMaskedWordPieceDataset, sizes, lambda: True, config).build()


def loss_func(loss_mask: Tensor, swapped: Tensor, output: tuple[Tensor, Tensor | None]) -> tuple[Any, ...]:
    """Returns the loss of a micro-batch and the report. The loss is the mean loss of its masked tokens plus the mean
    loss of the order of its segments (the binary head, the second output). Without the binary head, returns the sum
    over masked tokens, their number, and the report.

    `swapped` [b] is 1 where the segments are swapped, 0 where they are not, and -1 in rows without a loss. Both means
    have the scope of a micro-batch.
    """
    losses, in_order = output
    mask = loss_mask.view(-1).to(losses.dtype)
    total, count = torch.sum(losses.view(-1) * mask), mask.sum()
    report = {"lm loss": torch.stack([total.detach(), count])}
    if in_order is None:
        return total, count.to(torch.int64), report
    order = cross_entropy(in_order.to(losses.dtype), swapped, ignore_index=-1, reduction="sum")
    rows = (swapped >= 0).sum()
    report["sop loss"] = torch.stack([order.detach(), rows.to(order.dtype)])
    return total / count.clamp(min=1) + order / rows.clamp(min=1), report


def build_forward_step(context: Context, loss_func: LossFunction = loss_func) -> ForwardStep:
    """Returns a forward step whose loss is `loss_func(loss_mask, swapped, output)`."""
    device, has_types = context.environment.device, context.config.model.num_tokentypes > 0

    def forward_step(data: StepData, model: nn.Module) -> tuple[Any, LossFunction]:
        batch: BertBatch = next(data).to(device, non_blocking=True)
        rows, length = batch.text.shape
        output = model(
            batch.text,
            batch.padding_mask,
            batch.types if has_types else None,
            lm_labels=batch.labels,
            tokens=Tokens(length, rows, random=data.rng_position),
        )
        return output, partial(loss_func, batch.loss_mask, batch.is_random)

    return forward_step


if __name__ == "__main__":
    pretrain(Providers(build_model, build_datasets, build_forward_step), args_defaults=DEFAULTS)
