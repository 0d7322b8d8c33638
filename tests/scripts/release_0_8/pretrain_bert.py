"""Imports, reads and calls what pretrain_bert of Megatron-LM 0.8 does; see tests/scripts/test_scripts.py."""

from functools import partial

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.core.datasets.utils import get_blend_from_list
import megatron.legacy.model
from megatron.training.utils import average_losses_across_data_parallel_group
import torch.nn.functional as F
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec, bert_layer_with_transformer_engine_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.spec_utils import import_module


def model_provider(pre_process=True, post_process=True):
    print_rank_0("building BERT model ...")
    args = get_args()
    config = core_transformer_config_from_args(args)
    num_tokentypes = 2 if args.bert_binary_head else 0
    if args.use_legacy_models:
        model = megatron.legacy.model.BertModel(
            config=config,
            num_tokentypes=num_tokentypes,
            add_binary_head=args.bert_binary_head,
            parallel_output=True,
            pre_process=pre_process,
            post_process=post_process,
        )
    else:
        if args.spec is None:
            transformer_layer_spec = bert_layer_with_transformer_engine_spec
        elif args.spec[0] == "local":
            transformer_layer_spec = bert_layer_local_spec
        else:
            transformer_layer_spec = import_module(args.spec)
        model = BertModel(
            config=config,
            num_tokentypes=num_tokentypes,
            transformer_layer_spec=transformer_layer_spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            add_binary_head=args.bert_binary_head,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            parallel_output=True,
            pre_process=pre_process,
            post_process=post_process,
        )
    return model


def get_batch(data_iterator):
    keys = ["text", "types", "labels", "is_random", "loss_mask", "padding_mask"]
    data = next(data_iterator) if data_iterator is not None else None
    data_b = tensor_parallel.broadcast_data(keys, data, torch.int64)
    tokens, types = data_b["text"].long(), data_b["types"].long()
    sentence_order, loss_mask = data_b["is_random"].long(), data_b["loss_mask"].float()
    lm_labels, padding_mask = data_b["labels"].long(), data_b["padding_mask"].long()
    return tokens, types, sentence_order, loss_mask, lm_labels, padding_mask


def loss_func(loss_mask, sentence_order, output_tensor):
    lm_loss_, sop_logits = output_tensor
    lm_loss_, loss_mask = lm_loss_.float(), loss_mask.float()
    lm_loss = torch.sum(lm_loss_.view(-1) * loss_mask.reshape(-1)) / loss_mask.sum()
    if sop_logits is not None:
        sop_loss = F.cross_entropy(sop_logits.view(-1, 2).float(), sentence_order.view(-1), ignore_index=-1).float()
        averaged_losses = average_losses_across_data_parallel_group([lm_loss, sop_loss])
        return lm_loss + sop_loss, {"lm loss": averaged_losses[0], "sop loss": averaged_losses[1]}
    averaged_losses = average_losses_across_data_parallel_group([lm_loss])
    return lm_loss, {"lm loss": averaged_losses[0]}


def forward_step(data_iterator, model):
    args = get_args()
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, types, sentence_order, loss_mask, lm_labels, padding_mask = get_batch(data_iterator)
    timers("batch-generator").stop()
    if not args.bert_binary_head:
        types = None
    output_tensor = model(tokens, padding_mask, tokentype_ids=types, lm_labels=lm_labels)
    return output_tensor, partial(loss_func, loss_mask, sentence_order)


def train_valid_test_datasets_provider(train_val_test_num_samples):
    args = get_args()
    tokenizer = get_tokenizer()
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        blend_per_split=[
            get_blend_from_list(args.train_data_path),
            get_blend_from_list(args.valid_data_path),
            get_blend_from_list(args.test_data_path),
        ],
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
    )
    print_rank_0("> building train, validation, and test datasets ...")
    train_ds, valid_ds, test_ds = BlendedMegatronDatasetBuilder(
        BERTMaskedWordPieceDataset,
        train_val_test_num_samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0,
        config,
    ).build()
    return train_ds, valid_ds, test_ds


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "BertWordPieceLowerCase"},
    )
