"""The keys of DeepSpeed's JSON, and how each is answered. A section that has one answer covers all keys in it.

Names and defaults: https://www.deepspeed.ai/docs/config-json/ and the config classes of release 0.19.
"""

import math

from megatron.training.config.foreign.answers import (
    Answer,
    accepted,
    answers_of,
    becomes,
    number,
    read_by,
    refused,
    switch,
    whole,
    word,
)

_SAME = "the result is the same"
_BUFFERS = f"weights, gradients and state lie in flat buffers of whole layers, and {_SAME}"
_SHARDS = f"shards are gathered layer by layer, and {_SAME}"
_RECOMPUTE = "--recompute-granularity says what is recomputed and --cpu-offloading-num-layers what waits on the host"
_NAMES = "our layers know how they are split, so no names of modules are needed"
_ROUTER = "the model's flags describe the router"
_PROFILE = "--profile records steps with Nsight Systems or PyTorch's profiler"
_TENSORBOARD = "`--tensorboard-dir output_path/job_name`"
_BATCH = "Two of the three batch sizes give the third; if all are given, they are checked"
_SERVICE = "environment variables of the service set it"

TOP: dict[str, Answer] = {
    "train_batch_size": read_by(f"`--global-batch-size`. {_BATCH}", whole),
    "train_micro_batch_size_per_gpu": becomes("micro_batch_size", whole),
    "gradient_accumulation_steps": becomes("gradient_accumulation_steps", whole),
    "managed_gradient_accumulation": refused("the training loop is ours and manages the accumulation", True),
    "gradient_clipping": becomes("clip_grad", number),
    "steps_per_print": becomes("log_interval", lambda steps: 10**9 if steps in (math.inf, "inf") else whole(steps)),
    "wall_clock_breakdown": read_by("`--timing-log-level 2` if true", switch),
    "dump_state": becomes("print_config", switch),
    "disable_python_gc": becomes("manual_gc", switch),
    "memory_breakdown": read_by("`--log-memory-interval 1` if true", switch),
    "log_level": accepted("--logging-level sets the level of Python's loggers"),
    "communication_data_type": read_by(
        "`--grad-reduce-in-bf16` for the model's own 16-bit type; fp32 is the default", word
    ),
    "gradient_allreduce_op": refused("a sum makes the gradient grow with the number of ranks; mean works", "mean"),
    "seq_parallel_communication_data_type": accepted("activations are sent in the type they are computed in", "fp32"),
    "fp32_allreduce": accepted("gradients are reduced in float32 unless --grad-reduce-in-bf16 is given"),
    "vocabulary_size": accepted("--make-vocab-size-divisible-by pads the vocabulary"),
    "use_data_before_expert_parallelism": accepted(f"the order of ranks is fixed, and {_SAME}"),
    "use_node_local_storage": refused("all ranks read and write one folder; name a shared one with --save"),
    "load_universal": accepted("every checkpoint can be loaded under every layout"),
    "max_grad_norm": refused("gradient_clipping is today's name of this key"),
    "sequence_parallel_size": read_by("`--context-parallel-size` with `--cp-comm-type a2a`, which is Ulysses", whole),
    "zero_force_ds_cpu_optimizer": accepted("the device updates state in host memory, with the same optimizer", True),
    **answers_of(
        accepted("gradients are divided by the number of ranks in float32, where the order does not matter", 1.0, 1),
        "prescale_gradients gradient_predivide_factor",
    ),
    **answers_of(
        accepted("one optimizer and one kind of gradient serve every stage", True),
        "sparse_gradients zero_allow_untested_optimizer disable_allgather dataloader_drop_last ddp_bf16",
    ),
    # sections with one answer
    "amp": refused("Apex is not used; give bf16 or fp16"),
    "torch_autocast": refused("weights are cast once, not at each operation; give bf16 or fp16"),
    "sparse_attention": refused("there is no block-sparse attention; --window-size limits what a token attends to"),
    "data_efficiency": refused("there are no curricula and no token dropping; --data-stages changes the blend"),
    "curriculum_learning": refused("there are no curricula; --data-stages changes the blend of the data"),
    "progressive_layer_drop": refused("no layers are dropped during training"),
    "eigenvalue": refused("no eigenvalues are computed"),
    "quantize_training": refused("there is no such quantization; --fp8-format trains in fp8"),
    "compression_training": refused("there is no pruning and no quantization; --fp8-format trains in fp8"),
    "weight_quantization": refused("weights are not quantized; --fp8-format trains in fp8"),
    "elasticity": refused("a run has one number of ranks; --load continues it with any other, on the same batches"),
    "nebula": refused("there is no such service; --async-save writes checkpoints while training continues"),
    "hybrid_engine": refused("a run trains and does not generate; tools/generate.py does"),
    "autotuning": refused("nothing is tried out by running it; tools/plan.py chooses a layout and batch sizes"),
    "aio": accepted("nothing is written to NVMe devices"),
}

PRECISION: dict[str, Answer] = {
    "fp16.enabled": becomes("fp16", switch),
    "fp16.auto_cast": accepted("inputs are token ids, which have no floating type"),
    "fp16.loss_scale": read_by("`--loss-scale`; 0 keeps the dynamic scale", number),
    "fp16.initial_scale_power": read_by("`--initial-loss-scale`, as a power of two", whole),
    "fp16.loss_scale_window": becomes("loss_scale_window", number),
    "fp16.hysteresis": becomes("hysteresis", whole),
    "fp16.min_loss_scale": becomes("min_loss_scale", number),
    "fp16.consecutive_hysteresis": refused("overflows are counted until the scale grows, as with false"),
    "fp16.fp16_master_weights_and_grads": refused(
        "main gradients are float32; --use-precision-aware-optimizer --main-params-dtype fp16 has main weights in fp16"
    ),
    "bf16.enabled": becomes("bf16", switch),
    "bf16.bf16_master_weights_and_grads": refused(
        "--use-precision-aware-optimizer keeps main weights exactly in 2 bytes beside the weights, and "
        "--main-grads-dtype bf16 the gradients in bf16: give them instead"
    ),
    "bf16.bf16_optimizer_states": refused(
        "give --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 instead"
    ),
    "bf16.immediate_grad_update": accepted("gradients are added to main gradients in backward", True),
    "bf16.check_grad_overflow": accepted("gradients are checked unless --no-check-for-nan-in-loss-and-grad", True),
    "data_types.grad_accum_dtype": read_by(
        "fp32 is the default; bf16 is `--use-precision-aware-optimizer --main-grads-dtype bf16`", word
    ),
    **answers_of(
        accepted("bf16 and fp16 set the type of the weights", "auto"),
        "data_types.param_dtype data_types.buffer_dtype data_types.keep_in_fp32_modules",
    ),
}

_Z = "zero_optimization."
ZERO: dict[str, Answer] = {
    f"{_Z}stage": read_by(
        "1: `--use-distributed-optimizer`; 2 and 3: `--use-megatron-fsdp --data-parallel-sharding-strategy` "
        "`optim_grads` and `optim_grads_params`",
        whole,
    ),
    f"{_Z}overlap_comm": becomes("overlap_grad_reduce", switch),
    f"{_Z}reduce_bucket_size": becomes("bucket_size", whole),
    f"{_Z}cpu_offload": becomes("optimizer_cpu_offload", switch),
    f"{_Z}offload_optimizer.device": read_by("cpu and nvme: `--optimizer-cpu-offload`", word),
    f"{_Z}offload_optimizer.nvme_path": read_by("with nvme: `--optimizer-nvme-offload-path`", word),
    f"{_Z}offload_optimizer.pin_memory": read_by("`--no-pin-cpu-params` if false", switch),
    f"{_Z}offload_optimizer.ratio": read_by("`--optimizer-offload-fraction`", number),
    f"{_Z}offload_param.device": read_by(
        "cpu has no effect: the shards of weights stay on the device, and a line says so; nvme: "
        "`--param-nvme-offload-path`",
        word,
    ),
    f"{_Z}offload_param.nvme_path": read_by("with nvme: `--param-nvme-offload-path`", word),
    f"{_Z}zero_quantized_weights": refused("weights are gathered as they are; --fp8-param-gather gathers fp8 weights"),
    f"{_Z}zero_quantized_nontrainable_weights": refused("weights are gathered as they are"),
    f"{_Z}zero_quantized_gradients": refused("gradients are reduced in float32, or with --grad-reduce-in-bf16 in bf16"),
    f"{_Z}zenflow": refused("every weight is updated in every step"),
    f"{_Z}load_from_fp32_weights": accepted("checkpoints have the main weights, which are loaded", True),
    f"{_Z}elastic_checkpoint": accepted("every checkpoint can be loaded under every layout", True),
    f"{_Z}ignore_unused_parameters": accepted("every parameter is used", True),
    f"{_Z}compute_grad_norm": accepted("the norm is computed on the device with the update", True),
    **answers_of(
        accepted(_BUFFERS, True),
        "allgather_partitions allgather_bucket_size reduce_scatter contiguous_gradients round_robin_gradients "
        "parameter_alignment sub_group_size use_multi_rank_bucket_allreduce legacy_stage1 grad_hooks "
        "save_muon_momentum_buffer_in_memory cpu_offload_use_pin_memory cpu_offload_params cpu_offload_param "
        "pipeline_loading_checkpoint enable_sanity_checks",
        section="zero_optimization",
    ),
    **answers_of(
        accepted(_SHARDS, True, 1),
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential max_live_parameters max_reuse_distance prefetch_bucket_size "
        "param_persistence_threshold model_persistence_threshold module_granularity_threshold "
        "use_all_reduce_for_fetch_params allgather_sequential zero_hpz_partition_size mics_shard_size "
        "mics_hierarchical_params_gather memory_efficient_linear override_module_apply "
        "log_trace_cache_warnings leaf_module",
        section="zero_optimization",
    ),
    **answers_of(
        accepted("--save-hf-interval writes folders that transformers loads", True),
        f"{_Z}stage3_gather_16bit_weights_on_model_save {_Z}stage3_gather_fp16_weights_on_model_save "
        f"{_Z}gather_16bit_weights_on_model_save",
    ),
    **answers_of(
        accepted("it is about NVMe devices"),
        "offload_optimizer.buffer_count offload_optimizer.pipeline_read "
        "offload_optimizer.pipeline_write offload_param.buffer_count "
        "offload_param.buffer_size offload_param.max_in_cpu",
        section="zero_optimization",
    ),
    **answers_of(
        accepted("the update is computed on the device, and copies overlap with it", True),
        f"{_Z}offload_optimizer.fast_init {_Z}offload_optimizer.super_offload "
        f"{_Z}offload_optimizer.cpuadam_cores_perc {_Z}offload_optimizer.pipeline {_Z}offload_param.pin_memory",
    ),
}

PARTS: dict[str, Answer] = {
    "optimizer.type": read_by(
        "Adam and AdamW: `--optimizer adam`; SGD: `--optimizer sgd`; others are refused by name", word
    ),
    "optimizer.legacy_fusion": accepted("there is one fused update", True),
    "optimizer.params.lr": becomes("lr", number),
    "optimizer.params.betas": read_by("`--adam-beta1 --adam-beta2`"),
    "optimizer.params.eps": becomes("adam_eps", number),
    "optimizer.params.weight_decay": becomes("weight_decay", number),
    "optimizer.params.momentum": becomes("sgd_momentum", number),
    "optimizer.params.adam_w_mode": refused(
        "weight decay acts on the weights (AdamW), not on the gradient; true works", True
    ),
    "optimizer.params.bias_correction": refused("moments are always corrected; true works", True),
    "optimizer.params.amsgrad": refused("there is no AMSGrad; false works"),
    "optimizer.params.maximize": refused("the loss is always minimized; false works"),
    "optimizer.params.nesterov": refused("SGD has plain momentum; false works"),
    "optimizer.params.dampening": refused("SGD has plain momentum; 0 works", 0, 0.0),
    "optimizer.params.max_grad_norm": refused("gradient_clipping is the key that clips", 0, 0.0),
    **answers_of(
        accepted("one fused update on the device serves all; the result is the same", True),
        "torch_adam fused foreach capturable differentiable set_grad_none freeze_step amsgrad_mode "
        "fp32_optimizer_states adamw_mode",
        section="optimizer.params",
    ),
    "scheduler.type": read_by(
        "WarmupLR: `--lr-decay-style constant`; WarmupDecayLR: `linear`; WarmupCosineLR: `cosine`; others are refused "
        "by name",
        word,
    ),
    "scheduler.params.warmup_min_lr": read_by("`--lr-warmup-init`; for WarmupDecayLR also `--min-lr`", number),
    "scheduler.params.warmup_max_lr": read_by("`--lr`, in place of the optimizer's", number),
    "scheduler.params.warmup_num_steps": becomes("lr_warmup_iters", whole),
    "scheduler.params.warmup_type": becomes("lr_warmup_style"),
    "scheduler.params.total_num_steps": becomes("lr_decay_iters", whole),
    "scheduler.params.warmup_min_ratio": read_by("`--lr-warmup-init`, as a share of the rate", number),
    "scheduler.params.cos_min_ratio": read_by("`--min-lr`, as a share of the rate", number),
    "scheduler.params.last_batch_iteration": refused("a run begins at step 0, or where --load continues it", -1),
    "activation_checkpointing.partition_activations": accepted(
        "--distribute-saved-activations with --recompute-granularity full splits saved activations"
    ),
    **answers_of(
        accepted(_RECOMPUTE),
        "cpu_checkpointing contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary profile",
        section="activation_checkpointing",
    ),
    "pipeline.stages": becomes("pipeline_model_parallel_size", whole),
    "pipeline.activation_checkpoint_interval": read_by(
        "`--recompute-granularity full --recompute-method uniform --recompute-num-layers N`; 0: nothing", whole
    ),
    **answers_of(
        accepted(
            "layers are divided evenly or by --pipeline-model-parallel-layout, and the result is the same", True, "best"
        ),
        "pipeline.partition pipeline.seed_layers pipeline.pipe_partitioned pipeline.grad_partitioned "
        "pipeline.use_reentrant",
    ),
    "tensor_parallel.autotp_size": read_by("`--tensor-model-parallel-size`; 0 is 1", whole),
    "tensor_parallel.tp_overlap_comm": accepted("--tp-comm-overlap with --sequence-parallel overlaps products"),
    **answers_of(
        accepted(_NAMES),
        "preset_model partition_config vocab_parallel_lm_head vocab_parallel_ce_backend dtype tp "
        "tensor_parallel injection_policy_tuple keep_module_on_host kernel_inject replace_with_kernel_inject",
        section="tensor_parallel",
    ),
    "expert_parallel.enabled": read_by("`--expert-model-parallel-size autoep_size` if true", switch),
    "expert_parallel.autoep_size": read_by("`--expert-model-parallel-size`", whole),
    "expert_parallel.expert_tensor_parallel_size": becomes("expert_tensor_parallel_size", whole),
    **answers_of(
        refused(f"{_ROUTER}: give --moe-router-topk and its other flags", "auto", 1.0, False),
        "score_func score_apply route_norm route_scale top_k routed_scaling_factor num_expert_groups "
        "num_limited_groups load_balance_coeff has_shared_experts",
        section="expert_parallel",
    ),
    **answers_of(
        accepted(f"{_NAMES}, and kernels of experts follow from the machine", True, "auto"),
        "preset_model use_grouped_mm disable_triton_grouped_mm moe_layer_pattern router_pattern "
        "expert_pattern combine_impl expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr "
        "shared_experts_pattern async_split_plan comm_backend",
        section="expert_parallel",
    ),
}

WATCHING: dict[str, Answer] = {
    "flops_profiler.enabled": becomes("log_throughput", switch),
    **answers_of(
        accepted(_PROFILE, True),
        "profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
        section="flops_profiler",
    ),
    "tensorboard.enabled": read_by(f"{_TENSORBOARD} if true", switch),
    "tensorboard.output_path": read_by(_TENSORBOARD, word),
    "tensorboard.job_name": read_by(_TENSORBOARD, word),
    "wandb.enabled": read_by("`--wandb-project` and `--wandb-exp-name` if true", switch),
    "wandb.project": read_by("`--wandb-project`", word),
    "wandb.team": read_by("`--wandb-entity`", word),
    "wandb.group": read_by("`--wandb-exp-name`, unless the flag is given: a run needs a name", word),
    "comet.enabled": read_by("`--log-to comet` if true", switch),
    **answers_of(
        accepted(f"{_SERVICE}, such as COMET_PROJECT_NAME"),
        "samples_log_interval project workspace api_key experiment_name experiment_key online mode",
        section="comet",
    ),
    "csv_monitor.enabled": read_by(
        "`--metrics-path output_path/job_name/metrics.jsonl` if true: JSON lines, not CSV", switch
    ),
    "csv_monitor.output_path": read_by("`--metrics-path`", word),
    "csv_monitor.job_name": read_by("`--metrics-path`", word),
    "comms_logger.enabled": read_by("`--timing-log-level 2` if true, which times each message", switch),
    **answers_of(
        accepted("--timing-log-level 2 times all operations", True),
        "comms_logger.verbose comms_logger.prof_all comms_logger.debug comms_logger.prof_ops",
    ),
    "checkpoint.tag_validation": accepted("all ranks agree on the checkpoint before they write it", "Warn", "Ignore"),
    "checkpoint.load_universal": accepted("every checkpoint can be loaded under every layout"),
    "checkpoint.use_node_local_storage": refused("all ranks read and write one folder; name a shared one with --save"),
    "checkpoint.parallel_write": accepted("every rank writes its own part", True),
    "checkpoint.writer": accepted("--async-save writes while training continues"),
    "checkpoint.checkpoint_serialization": accepted("checkpoints are safetensors", True),
    "compile": accepted("our own kernels are faster than generated ones; the result is the same"),
}

DEEPSPEED: dict[str, Answer] = {**TOP, **PRECISION, **ZERO, **PARTS, **WATCHING}
"""Every key, with the sections that lead to it, joined by dots."""
