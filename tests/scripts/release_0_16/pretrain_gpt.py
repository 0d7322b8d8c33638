"""Imports, reads and calls what pretrain_gpt of Megatron-LM 0.16 does; see tests/scripts/test_scripts.py."""

import time

_PROGRAM_START_TIME = time.time()

import torch
from functools import partial
from megatron.core.enums import ModelType
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt import GPTModel
from megatron.core import parallel_state
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training.arguments import core_transformer_config_from_args
from megatron.core.utils import StragglerDetector
from megatron.training.utils import get_blend_and_blend_per_split
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import inprocess_restart
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.core.utils import get_attr_wrapped_model
from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
from gpt_builders import gpt_builder
from model_provider import model_provider
from megatron.training import set_startup_timestamps
from megatron.training.utils import is_first_or_last_pipeline_stage
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.core.utils import get_batch_on_this_hybrid_cp_rank, get_thd_batch_on_this_cp_rank
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
import json

try:
    from megatron.post_training.arguments import add_modelopt_args
    from megatron.post_training.loss_func import loss_func as loss_func_modelopt

    has_nvidia_modelopt = True
except ImportError:
    has_nvidia_modelopt = False

stimer = StragglerDetector()


def get_batch(data_iterator, vp_stage=None):
    args = get_args()
    config = core_transformer_config_from_args(args)
    mtp_here = mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not mtp_here:
        return None, None, None, None, None, None
    batch = get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=mtp_here)
    cu_seqlens = batch.pop("cu_seqlens")
    max_seqlen = batch.pop("max_seqlen")
    local_cp_size = batch.pop("local_cp_size")
    if local_cp_size is not None:
        batch, packed_seq_params = get_batch_on_this_hybrid_cp_rank(batch, local_cp_size)
    elif cu_seqlens is None:
        batch, packed_seq_params = get_batch_on_this_cp_rank(batch), None
    else:
        batch, packed_seq_params = get_thd_batch_on_this_cp_rank(batch, cu_seqlens, None, max_seqlen)
    return (*batch.values(), packed_seq_params)


SPIKY_LOSS_FACTOR = 10


def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor, model=None):
    args = get_args()
    if has_nvidia_modelopt and getattr(args, "modelopt_enabled", False):
        return loss_func_modelopt(loss_mask, output_tensor, model=model)
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    rerun_state_machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejection_func, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            rerun_state_machine.validate_result(
                result=loss,
                rejection_func=rejection_func,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        rerun_state_machine.validate_result(
            result=loss,
            rejection_func=partial(
                rerun_state_machine.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    reporting_loss = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": reporting_loss}


def forward_step(data_iterator, model: GPTModel, return_schedule_plan: bool = False):
    args = get_args()
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    global stimer
    with stimer(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    with stimer:
        if args.use_legacy_models:
            output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
        elif return_schedule_plan:
            assert args.overlap_moe_expert_parallel_comm
            plan = model.build_schedule_plan(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
            return plan, partial(loss_func, loss_mask, model=model)
        else:
            output_tensor = model(
                tokens,
                position_ids,
                attention_mask,
                labels=labels,
                loss_mask=loss_mask,
                packed_seq_params=packed_seq_params,
            )
    return output_tensor, partial(loss_func, loss_mask, model=model)


def is_dataset_built_on_rank(vp_stage=None):
    return is_first_or_last_pipeline_stage(vp_stage) and parallel_state.get_tensor_model_parallel_rank() == 0


def core_gpt_dataset_config_from_args(args):
    tokenizer = get_tokenizer() if args.legacy_tokenizer else build_tokenizer(args)
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    if args.fim_data:
        fim_extra_tokens = {
            "prefix": args.fim_prefix_token,
            "middle": args.fim_middle_token,
            "suffix": args.fim_suffix_token,
            "pad": args.fim_pad_token,
            "eod": args.fim_eod_token,
        }
        return GPTFIMDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            blend=blend,
            blend_per_split=blend_per_split,
            split=args.split,
            multiple_validation_sets=args.multiple_validation_sets,
            full_validation=args.full_validation,
            num_dataset_builder_threads=args.num_dataset_builder_threads,
            path_to_cache=args.data_cache_path,
            mmap_bin_files=args.mmap_bin_files,
            tokenizer=tokenizer,
            reset_position_ids=args.reset_position_ids,
            reset_attention_mask=args.reset_attention_mask,
            eod_mask_loss=args.eod_mask_loss,
            create_attention_mask=args.create_attention_mask_in_dataloader,
            object_storage_cache_path=args.object_storage_cache_path,
            mid_level_dataset_surplus=args.mid_level_dataset_surplus,
            allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
            context_parallel_size=args.context_parallel_size,
            data_parallel_size=args.data_parallel_size,
            sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
            hybrid_context_parallel=args.hybrid_context_parallel,
            fast_cache_load=args.dataloader_fast_cache_load,
            defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
            sequences_per_dataset=sequences_per_dataset,
            fim_rate=args.fim_rate,
            fim_spm_rate=args.fim_spm_rate,
            fim_extra_tokens=fim_extra_tokens,
            fim_split_sample=args.fim_split_sample,
            fim_fragment_rate=args.fim_fragment_rate,
            fim_no_prefix=args.fim_no_prefix,
        )
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=sequences_per_dataset,
    )


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    args = get_args()
    config = core_gpt_dataset_config_from_args(args)
    if args.sft:
        dataset_type = SFTDataset
    elif args.mock_data:
        dataset_type = MockGPTDataset
    elif args.fim_data:
        dataset_type = GPTFIMDataset
    else:
        dataset_type = GPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    train_ds, valid_ds, test_ds = BlendedMegatronDatasetBuilder(
        dataset_type, train_val_test_num_samples, partial(is_dataset_built_on_rank, vp_stage=vp_stage), config
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return train_ds, valid_ds, test_ds


def get_embedding_ranks(pp_ranks):
    args = get_args()
    embedding_ranks = [pp_ranks[0]]
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            embedding_ranks.append(pp_ranks[-1])
        config = core_transformer_config_from_args(args)
        embedding_ranks.extend(get_mtp_ranks(pp_ranks, config))
    return sorted(set(embedding_ranks))


if __name__ == "__main__":
    _MAIN_ENTRY_TIME = time.time()
    set_startup_timestamps(program_start=_PROGRAM_START_TIME, main_entry=_MAIN_ENTRY_TIME)
    train_valid_test_datasets_provider.is_distributed = True
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    pretrain(
        train_valid_test_datasets_provider,
        partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        extra_args_provider=add_modelopt_args if has_nvidia_modelopt else None,
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )
