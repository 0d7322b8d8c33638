"""Pretrains GPT, Llama and similar models:   torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 ...

This file has the providers of the run: model, data, batch, loss. `python pretrain_gpt.py --help` lists the flags; plain
`python` runs one process. A script of your own starts as a copy of this file.
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

from megatron.core.context_parallel import sequence_part
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tokens import SequencePart, Tokens
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, block_spec_of_flag
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.facades.pretrain import pretrain
from megatron.training.data.batch import Batch
from megatron.training.data.sources import gpt_dataset_config, gpt_dataset_kind, loss_names, with_source_losses
from megatron.training.data.step_data import StepData
from megatron.training.providers import Context, ForwardStep, LossFunction, Providers, SampleCounts, Stage


def build_layer_specs(context: Context, stage: Stage) -> TransformerBlockSubmodules:
    """Returns the specs of a stage's layers: those of --spec, or else by the flags."""
    words, position = context.config.model.spec, position_of(context, stage)
    if words is not None and words != ["local"]:
        return block_spec_of_flag(words, context.config.transformer, position["vp_stage"], position["pp_rank"])
    return get_gpt_decoder_block_spec(context.config.transformer, **position)


def build_model(context: Context, stage: Stage, layers: TransformerBlockSubmodules | None = None) -> GPTModel:
    """Builds the part of the model that a stage holds. `layers`: specs of its layers; default: `build_layer_specs`."""
    model, groups = context.config.model, context.environment.groups
    layers = layers or build_layer_specs(context, stage)
    return GPTModel(
        config=model.transformer,
        transformer_layer_spec=layers,
        vocab_size=context.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=stage.pre_process,
        post_process=stage.post_process,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        mtp_block_spec=get_gpt_mtp_block_spec(model.transformer, layers, **position_of(context, stage)),
        vocab_padding_multiple=model.make_vocab_size_divisible_by * model.transformer.tensor_model_parallel_size,
        pg_collection=groups,
        vp_stage=stage.virtual,
    )


def position_of(context: Context, stage: Stage) -> dict[str, Any]:
    """Returns the arguments of spec functions that identify the layers of a stage."""
    pipeline_rank = context.environment.groups.rank("pp")
    return {"use_transformer_engine": False, "vp_stage": stage.virtual, "pp_rank": pipeline_rank}


def build_datasets(context: Context, counts: SampleCounts) -> Sequence[Any]:
    """Builds the datasets of the train, valid and test split from --data-path and --split."""
    config = gpt_dataset_config(context.config, context.tokenizer)
    kind = gpt_dataset_kind(context.config)
    sizes = [counts.train, counts.valid, counts.test]
    return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the sum of the losses of unmasked tokens, their number, and both for the report."""
    mask = loss_mask.view(-1).to(losses.dtype)
    total = torch.sum(losses.view(-1) * mask)
    count = mask.sum().to(torch.int64)
    return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}


def build_forward_step(context: Context, loss_func: LossFunction = loss_func) -> ForwardStep:
    """Returns a forward step whose loss is `loss_func(loss_mask, losses)`."""
    device, groups = context.environment.device, context.environment.groups
    sources = loss_names(context.config)

    def forward_step(data: StepData, model: nn.Module) -> tuple[Tensor, LossFunction]:
        batch: Batch = next(data).to(device, non_blocking=True)
        sample_length = batch.tokens.shape[1]
        part = sequence_part(groups, batch.local_cp_size)
        batch = (batch if batch.cu_seqlens is None else batch.laid_end_to_end()).part(part)
        tokens = describe_tokens(batch, data, part, sample_length)
        inputs = (batch.tokens, batch.position_ids, batch.attention_mask)
        losses = model(*inputs, labels=batch.labels, loss_mask=batch.loss_mask, tokens=tokens)
        loss = partial(loss_func, batch.loss_mask)
        return losses, with_source_losses(loss, batch, sources) if model.training and sources else loss

    return forward_step


def describe_tokens(batch: Batch, data: StepData, part: SequencePart | None, sample_length: int) -> Tokens:
    """Returns the model's record of a micro-batch. It is packed if documents must not attend to each other."""
    rows, length = batch.tokens.shape
    return Tokens(
        seq_length=length,
        batch_size=rows,
        part=part,
        positions=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        sample_length=sample_length,
        random=data.rng_position,
    )


if __name__ == "__main__":
    providers = Providers(build_model, build_datasets, build_forward_step, cuts_shared_batches=True)
    pretrain(providers, args_defaults={"model_family": "gpt"})
