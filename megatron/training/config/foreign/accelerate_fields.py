"""The fields of Accelerate's config files and plugins, and how each is answered.

Names: the fields of ClusterConfig, MegatronLMPlugin, DeepSpeedPlugin, FullyShardedDataParallelPlugin and
ParallelismConfig of release 1.15. In files the names of a section may have a prefix (`megatron_lm_tp_degree`).
"""

from collections.abc import Mapping

from megatron.training.config.foreign.answers import (
    Answer,
    accepted,
    answers_of,
    becomes,
    fields,
    number,
    read_by,
    refused,
    same_named,
    switch,
    whole,
    word,
)

_TORCHRUN = "torchrun starts the processes"
_OURS = "the training loop is ours: a script of your own starts as a copy of pretrain_gpt.py"
_MODULES = "layers are the units of sharding, so no modules are named"
_SERVICE = "the device is the one that the machine has"


def _offloads(value: object) -> bool:
    """Reads what a plugin has: CPUOffload(offload_params) of the first version, CPUOffloadPolicy of the second."""
    kind = type(value).__name__
    if kind in ("CPUOffloadPolicy", "OffloadPolicy"):
        return kind == "CPUOffloadPolicy"
    return switch(getattr(value, "offload_params", value))


def _json_of_plugin(value: object) -> object:
    """Reads a file's name, the JSON itself, or the HfDeepSpeedConfig that a plugin makes of it."""
    found = getattr(value, "config", value)
    return fields(found) if isinstance(found, Mapping) else word(found)


CLUSTER: dict[str, Answer] = {
    "distributed_type": read_by("chooses the section that is read: MEGATRON_LM, DEEPSPEED or FSDP"),
    "num_processes": read_by("`--planned-world-size`: --dry-run lays the run out for it", whole),
    "mixed_precision": read_by("`--fp16`, `--bf16`; fp8: `--bf16 --fp8-format hybrid`"),
    "downcast_bf16": accepted("it is about TPUs", "no"),
    **answers_of(
        accepted(_TORCHRUN, "static", 0, 1, "main", "LOCAL_MACHINE", True),
        "compute_environment machine_rank num_machines gpu_ids main_process_ip main_process_port rdzv_backend "
        "same_network main_training_function enable_cpu_affinity mpirun_config command_file commands "
        "num_cpu_threads_per_process",
    ),
    **answers_of(accepted(_SERVICE), "use_cpu use_xpu ipex_config"),
    **answers_of(accepted("it is about TPUs"), "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env"),
    **answers_of(
        accepted("our own kernels are faster than generated ones; the result is the same", "no", "NO"),
        "dynamo_config dynamo_backend",
    ),
    "debug": accepted("operations of ranks are checked by --hang-timeout-seconds and its messages"),
    "fp16": becomes("fp16", switch),
}

_MEGATRON: dict[str, Answer] = {
    "tp_degree": becomes("tensor_model_parallel_size", whole),
    "pp_degree": becomes("pipeline_model_parallel_size", whole),
    "num_micro_batches": becomes("gradient_accumulation_steps", whole),
    "gradient_clipping": becomes("clip_grad", number),
    "sequence_parallelism": becomes("sequence_parallel", switch),
    "use_custom_fsdp": becomes("use_megatron_fsdp", switch),
    "decoder_last_pipeline_num_layers": becomes("num_layers_in_last_pipeline_stage", whole),
    **same_named(
        "recompute_activations use_distributed_optimizer overlap_cpu_optimizer_d2h_h2d no_load_optim "
        "no_save_optim eod_mask_loss optimizer_cpu_offload use_precision_aware_optimizer "
        "attention_softmax_in_fp32 calculate_per_token_loss",
        switch,
    ),
    **same_named(
        "recompute_num_layers expert_model_parallel_size context_parallel_size "
        "expert_tensor_parallel_size pipeline_model_parallel_split_rank "
        "num_layers_per_virtual_pipeline_stage train_iters train_samples lr_decay_iters lr_decay_samples "
        "lr_warmup_iters lr_warmup_samples seq_length encoder_seq_length decoder_seq_length eval_iters "
        "eval_interval",
        whole,
    ),
    **same_named(
        "attention_dropout hidden_dropout start_weight_decay end_weight_decay lr_warmup_fraction min_lr",
        number,
    ),
    **same_named(
        "recompute_granularity recompute_method weight_decay_incr_style lr_decay_style tensorboard_dir",
    ),
    "attention_backend": read_by("`--attention-backend` for a name; true is auto"),
    "use_rotary_position_embeddings": read_by("`--position-embedding-type rope` if true", switch),
    "other_megatron_args": read_by("each key is the name of a flag", fields),
    "set_all_logging_options": read_by("`--log-params-norm --log-num-zeros-in-grad --log-throughput` if true", switch),
    "is_train_batch_min": accepted("--micro-batch-size and --eval-micro-batch-size set the sizes", True),
    "megatron_dataset_flag": accepted("--data-path names data in Megatron-LM's format"),
    "consumed_samples": refused("a checkpoint says how many samples were consumed: --load"),
    "no_wd_decay_cond": refused("biases and norm weights have no weight decay; --apply-wd-to-qk-layernorm adds norms"),
    "scale_lr_cond": refused("all parameters have one rate; --decoupled-lr sets that of embedding and output layer"),
    "lr_mult": refused("all parameters have one rate; --decoupled-lr sets that of embedding and output layer", 1.0, 1),
    "return_logits": refused("the loop has losses, not logits; tools/evaluate.py scores a checkpoint"),
    **answers_of(
        refused(_OURS),
        "custom_train_step_class custom_train_step_kwargs custom_model_provider_function "
        "custom_prepare_model_function custom_megatron_datasets_provider_function custom_get_batch_function "
        "custom_loss_function",
    ),
}

_DEEPSPEED: dict[str, Answer] = {
    "deepspeed_config_file": read_by("a file for `--deepspeed-config`, from the folder of the run", word),
    "hf_ds_config": read_by("as `deepspeed_config_file`", _json_of_plugin),
    "zero_stage": read_by("as `zero_optimization.stage` of `--deepspeed-config`", whole),
    "gradient_accumulation_steps": read_by("`--gradient-accumulation-steps`", whole),
    "gradient_clipping": read_by("`--clip-grad`", number),
    "offload_optimizer_device": read_by(
        "as `zero_optimization.offload_optimizer.device` of `--deepspeed-config`", word
    ),
    "offload_param_device": read_by("as `zero_optimization.offload_param.device` of `--deepspeed-config`", word),
    "offload_optimizer_nvme_path": read_by(
        "as `zero_optimization.offload_optimizer.nvme_path` of `--deepspeed-config`", word
    ),
    "offload_param_nvme_path": read_by("as `zero_optimization.offload_param.nvme_path` of `--deepspeed-config`", word),
    "zero3_init_flag": accepted("every rank creates its own part of the model", True),
    "zero3_save_16bit_model": accepted("--save-hf-interval writes folders that transformers loads", True),
    "is_train_batch_min": accepted("--micro-batch-size and --eval-micro-batch-size set the sizes", True),
    "enable_msamp": refused("there is no MS-AMP; --fp8-format trains in fp8"),
    "msamp_opt_level": accepted("it is about MS-AMP"),
    **answers_of(accepted(_MODULES), "transformer_moe_cls_names deepspeed_moe_layer_cls_names"),
    **answers_of(
        accepted(_TORCHRUN, "standard"),
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter",
    ),
}

_FSDP: dict[str, Answer] = {
    "sharding_strategy": read_by(
        "FULL_SHARD: `--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params`; SHARD_GRAD_OP: "
        "`optim_grads`; NO_SHARD: nothing; others are refused by name"
    ),
    "reshard_after_forward": read_by("of version 2; true is FULL_SHARD, false SHARD_GRAD_OP"),
    "offload_params": read_by("`--optimizer-cpu-offload` if true: weights stay on the device", _offloads),
    "cpu_offload": read_by("as `offload_params`", _offloads),
    "activation_checkpointing": read_by(
        "`--recompute-granularity full --recompute-method uniform --recompute-num-layers 1` if true", switch
    ),
    "activation_checkpointing_offload": accepted("--cpu-offloading-num-layers keeps inputs of layers on the host"),
    "mixed_precision_policy": refused("mixed_precision sets the types"),
    "ignored_modules": refused("all parameters are sharded"),
    "param_init_fn": refused("weights are drawn by name, the same for every layout"),
    "fsdp_version": accepted("there is one version", 1, 2),
    "version": accepted("there is one version", 1, 2),
    "state_dict_type": accepted(
        "every rank writes its own part, which any layout loads", "SHARDED_STATE_DICT", "FULL_STATE_DICT"
    ),
    **answers_of(
        accepted("every rank writes its own part, which any layout loads"),
        "state_dict_config optim_state_dict_config",
    ),
    **answers_of(
        accepted(_MODULES, "TRANSFORMER_BASED_WRAP", "NO_WRAP", 0),
        "auto_wrap_policy transformer_cls_names_to_wrap transformer_layer_cls_to_wrap min_num_params",
    ),
    **answers_of(
        accepted("weights of the next layer are gathered while this one computes", True, "BACKWARD_PRE", "NO_PREFETCH"),
        "backward_prefetch forward_prefetch limit_all_gathers use_orig_params sync_module_states "
        "cpu_ram_efficient_loading",
    ),
}

_PARALLELISM: dict[str, Answer] = {
    "tp_size": becomes("tensor_model_parallel_size", whole),
    "cp_size": becomes("context_parallel_size", whole),
    "sp_size": read_by("`--context-parallel-size` with `--cp-comm-type a2a`, which is Ulysses", whole),
    "dp_replicate_size": read_by("`--num-distributed-optimizer-instances`, if dp_shard_size is above 1", whole),
    "dp_shard_size": accepted("data parallel ranks are those that no other axis takes", 1),
    **answers_of(
        accepted("--cp-comm-type and the machine choose how ranks exchange a sequence", "torch", "allgather"),
        "cp_backend cp_comm_strategy cp_handler sp_backend sp_handler tp_handler sp_seq_length "
        "sp_seq_length_is_variable sp_attn_implementation",
    ),
}

_FP8: dict[str, Answer] = {
    "fp8_format": read_by("`--fp8-format`: HYBRID, E4M3", word),
    "format": read_by("`--fp8-format`: HYBRID, E4M3", word),
    "margin": becomes("fp8_margin", whole),
    "amax_history_length": becomes("fp8_amax_history_len", whole),
    "amax_history_len": becomes("fp8_amax_history_len", whole),
    "amax_compute_algorithm": becomes("fp8_amax_compute_algo"),
    "amax_compute_algo": becomes("fp8_amax_compute_algo"),
    **answers_of(
        accepted("--fp8-recipe chooses how scales are found, and our own kernels compute", "TE", 1, "O2"),
        "backend interval optimization_level opt_level override_linear_precision use_autocast_during_eval "
        "enable_fsdp_float8_all_gather pad_inner_dim",
    ),
}

PREFIXES = {
    "megatron_lm_config": "megatron_lm_",
    "deepspeed_config": "",
    "fsdp_config": "fsdp_",
    "parallelism_config": "parallelism_config_",
    "fp8_config": "fp8_",
}
"""Sections, and what may stand before each of their names."""

SECTIONS = {
    "megatron_lm_config": _MEGATRON,
    "deepspeed_config": _DEEPSPEED,
    "fsdp_config": _FSDP,
    "parallelism_config": _PARALLELISM,
    "fp8_config": _FP8,
}

ACCELERATE: dict[str, Answer] = {
    **CLUSTER,
    **{f"{section}.{name}": answer for section, table in SECTIONS.items() for name, answer in table.items()},
}
"""Every field, with its section."""
