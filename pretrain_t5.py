"""Pretrains T5:   torchrun --nproc_per_node 8 pretrain_t5.py --encoder-num-layers 12 --decoder-num-layers 12 ...

This file has the providers of the run: model, data, batch; the loss is that of pretrain_gpt.py. `python pretrain_t5.py
--help` lists the flags; plain `python` runs one process. The data is split into sentences or documents
(tools/preprocess_data.py), and the tokenizer has sentinels (--vocab-extra-ids).
"""

import copy
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

from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.core.transformer.layer_inputs import key_padding_mask
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.t5_dataset import T5MaskedWordPieceDataset
from megatron.facades.pretrain import pretrain
from megatron.training.data.masked_data import T5Batch, t5_dataset_config
from megatron.training.data.step_data import StepData
from megatron.training.providers import Context, ForwardStep, LossFunction, Providers, SampleCounts, Stage
from pretrain_gpt import loss_func

DEFAULTS = {"model_family": "t5", "tokenizer_type": "BertWordPieceLowerCase"}
"""Defaults of flags in this script."""


def build_model(context: Context, stage: Stage) -> T5Model:
    """Builds the part of the model that a stage holds."""
    model, decoder = context.config.model, context.config.transformer
    if not decoder.num_encoder_layers:
        raise UserError("pretrain_t5.py: --decoder-seq-length is missing, the tokens of the decoder's part of a sample")
    encoder = copy.copy(decoder)
    encoder.num_layers = decoder.num_encoder_layers
    return T5Model(
        config=decoder,
        encoder_config=encoder,
        transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(encoder.num_layers),
        transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(decoder.num_layers),
        vocab_size=context.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=stage.pre_process,
        post_process=stage.post_process,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        relative_attention_num_buckets=model.relative_attention_num_buckets,
        relative_attention_max_distance=model.relative_attention_max_distance,
        head_bias=model.t5_head_bias,
        add_encoder=stage.add_encoder,
        add_decoder=stage.add_decoder,
        vocab_padding_multiple=model.make_vocab_size_divisible_by * decoder.tensor_model_parallel_size,
        pg_collection=context.environment.groups,
    )


def build_datasets(context: Context, counts: SampleCounts) -> Sequence[Any]:
    """Builds the datasets of the train, valid and test split from --data-path and --split."""
    config = t5_dataset_config(context.config, context.tokenizer)
    sizes = [counts.train, counts.valid, counts.test]
    return BlendedMegatronDatasetBuilder(T5MaskedWordPieceDataset, sizes, lambda: True, config).build()


def build_forward_step(context: Context, loss_func: LossFunction = loss_func) -> ForwardStep:
    """Returns a forward step whose loss is `loss_func(loss_mask, losses)`."""
    device = context.environment.device

    def forward_step(data: StepData, model: nn.Module) -> tuple[Tensor, LossFunction]:
        batch: T5Batch = next(data).to(device, non_blocking=True)
        padding = key_padding_mask(batch.enc_mask)
        # The decoder's padding comes after its tokens, which do not see it: no mask is needed there.
        masks = {"encoder_attn_mask": padding, "encoder_decoder_attn_mask": padding}
        labels = batch.labels.clamp(min=0)  # -1 at padding, which has no loss
        losses = model(batch.text_enc, batch.text_dec, **masks, lm_labels=labels)
        return losses, partial(loss_func, batch.loss_mask)

    return forward_step


if __name__ == "__main__":
    pretrain(Providers(build_model, build_datasets, build_forward_step), args_defaults=DEFAULTS)
