"""Imports, reads and calls what pretrain_t5 of Megatron-LM 0.6 does; see tests/scripts/test_scripts.py."""

from functools import partial

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.legacy.model import T5Model as LegacyT5Model
from megatron.training.utils import average_losses_across_data_parallel_group
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_local_block_spec,
    get_t5_decoder_with_transformer_engine_block_spec,
    get_t5_encoder_with_local_block_spec,
    get_t5_encoder_with_transformer_engine_block_spec,
)


def model_provider(pre_process=True, post_process=True, add_encoder=True, add_decoder=True):
    args = get_args()
    config = core_transformer_config_from_args(args)
    if args.use_mcore_models:
        encoder_layers, decoder_layers = args.encoder_num_layers, args.decoder_num_layers
        if args.transformer_impl == "local":
            en_block_spec = get_t5_encoder_with_local_block_spec(encoder_layers)
            de_block_spec = get_t5_decoder_with_local_block_spec(decoder_layers)
        else:
            en_block_spec = get_t5_encoder_with_transformer_engine_block_spec(encoder_layers)
            de_block_spec = get_t5_decoder_with_transformer_engine_block_spec(decoder_layers)
        print_rank_0("building T5 model ...")
        model = T5Model(
            config=config,
            transformer_encoder_layer_spec=en_block_spec,
            transformer_decoder_layer_spec=de_block_spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
        )
    else:
        model = LegacyT5Model(
            config=config,
            num_tokentypes=0,
            parallel_output=True,
            pre_process=pre_process,
            post_process=post_process,
            add_encoder=add_encoder,
            add_decoder=add_decoder,
        )
    return model


def get_batch(data_iterator):
    args = get_args()
    keys = ["text_enc", "text_dec", "labels", "loss_mask", "enc_mask", "dec_mask", "enc_dec_mask"]
    data = next(data_iterator) if data_iterator is not None else None
    data_b = tensor_parallel.broadcast_data(keys, data, torch.int64)
    tokens_enc, tokens_dec = data_b["text_enc"].long(), data_b["text_dec"].long()
    labels, loss_mask = data_b["labels"].long(), data_b["loss_mask"].float()
    enc_mask, dec_mask = data_b["enc_mask"] < 0.5, data_b["dec_mask"] < 0.5
    enc_dec_mask = data_b["enc_dec_mask"] < 0.5
    return tokens_enc, tokens_dec, loss_mask, labels, enc_mask, dec_mask, enc_dec_mask


def loss_func(loss_mask, output_tensor):
    lm_loss_ = output_tensor.float()
    lm_loss = torch.sum(lm_loss_.view(-1) * loss_mask.reshape(-1)) / loss_mask.sum()
    averaged_losses = average_losses_across_data_parallel_group([lm_loss])
    return lm_loss, {"lm loss": averaged_losses[0]}


def forward_step(data_iterator, model: T5Model):
    timers = get_timers()
    timers("batch generator", log_level=2).start()
    tokens_enc, tokens_dec, loss_mask, lm_labels, enc_mask, dec_mask, enc_dec_mask = get_batch(data_iterator)
    timers("batch generator").stop()
    output_tensor = model(tokens_enc, tokens_dec, enc_mask, dec_mask, enc_dec_mask, lm_labels=lm_labels)
    return output_tensor, partial(loss_func, loss_mask)


def train_valid_test_datasets_provider(train_val_test_num_samples):
    args = get_args()
    tokenizer = get_tokenizer()
    config = T5MaskedWordPieceDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.encoder_seq_length,
        blend=args.data_path,
        blend_per_split=[args.train_data_path, args.valid_data_path, args.test_data_path],
        mock=False,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=10,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=True,
        sequence_length_decoder=args.decoder_seq_length,
    )
    print_rank_0("> building train, validation, and test datasets ...")
    train_ds, valid_ds, test_ds = BlendedMegatronDatasetBuilder(
        T5MaskedWordPieceDataset, train_val_test_num_samples, lambda: mpu.get_tensor_model_parallel_rank() == 0, config
    ).build()
    return train_ds, valid_ds, test_ds


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_and_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "BertWordPieceLowerCase"},
    )
