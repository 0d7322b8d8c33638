"""Fills in values that follow from other values. `checks` finds impossible ones."""

import contextlib
import math
from collections.abc import Callable

import torch

from megatron.core.declarations.config_fields import describe_problem
from megatron.core.exceptions import UserError
from megatron.core.ops.transformer_engine.engine import find_engine, unused_line, why_layers_stay_ours
from megatron.core.pipeline_parallel.stages import virtual_stages
from megatron.core.tensor_parallel.overlap import cuts_products
from megatron.core.transformer.config.heterogeneous import HETEROGENEOUS, encoded_layers
from megatron.core.transformer.config.memory import captures_micro_batches, graph_parts, unknown_parts
from megatron.core.transformer.layer_patterns import (
    PREDICTION_BORDER,
    evenly_mixed,
    has_heads,
    hybrid_letters,
    prediction_letters,
    stages_of_pattern,
)
from megatron.core.utils.stores import is_url
from megatron.data.datasets.utils import DEFAULT_SPLIT
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config import graph_checks
from megatron.training.config.flag_table import spelling_of
from megatron.training.config.measured_defaults import MEASURED_RULES
from megatron.training.config.settings import Settings, batch_steps, gpus_of_node


def derive_values(settings: Settings) -> list[str]:
    """Completes the settings in place. Returns notes about defaults that matter, and about flags that are not taken
    literally."""
    notes = []
    for derive in _DERIVATIONS:
        note = derive(settings)
        if note is not None:
            notes.append(note)
    return notes


def _encoder_spellings(s: Settings) -> None:
    if s.seq_length is None and s.encoder_seq_length is not None:
        s.set_derived("seq_length", s.encoder_seq_length)
    if has_decoder(s):
        _two_stacks(s)
    elif s.num_layers is None and s.encoder_num_layers is not None:
        s.set_derived("num_layers", s.encoder_num_layers)


def has_decoder(s: Settings) -> bool:
    """Whether the model has an encoder and a decoder: it is a T5, or the script names no model family and a flag gives
    the decoder's layers or length."""
    asked = s.decoder_num_layers is not None or s.decoder_seq_length is not None
    return s.model_family == "t5" or (s.model_family is None and asked)


def _two_stacks(s: Settings) -> None:
    """Sets the layers of encoder and decoder. --num-layers counts for the one without a flag of its own. Afterwards
    `num_layers` is the decoder's number, and `num_encoder_layers` the encoder's."""
    encoder = s.num_layers if s.encoder_num_layers is None else s.encoder_num_layers
    if s.encoder_seq_length is None and s.seq_length is not None:
        s.set_derived("encoder_seq_length", s.seq_length)
    if encoder is None:
        return
    default = encoder if s.num_layers is None else s.num_layers
    decoder = default if s.decoder_num_layers is None else s.decoder_num_layers
    for field, layers in (
        ("encoder_num_layers", encoder),
        ("decoder_num_layers", decoder),
        ("num_encoder_layers", encoder),
        ("num_layers", decoder),
    ):
        if getattr(s, field) != layers:
            s.set_derived(field, layers)
            if field != "num_encoder_layers" and field != "num_layers":
                s.provenance[field] = "flag"  # comes from --num-layers, whose own value this loop may replace
    stages = s.encoder_pipeline_model_parallel_size
    if stages > 0:  # translated into the flags that replace it
        split = s.pipeline_model_parallel_split_rank
        for field, value in (
            ("encoder_pipeline_model_parallel_size", 0),
            ("pipeline_model_parallel_size", stages + s.pipeline_model_parallel_size),
            ("pipeline_model_parallel_split_rank", stages if split is None else split),
        ):
            s.values[field] = value
            s.provenance[field] = "flag"


def _hybrid(s: Settings) -> str | None:
    """Sets the layers of a hybrid model, their number, and the pipeline stages that the pattern marks."""
    note, ratios = None, (s.hybrid_attention_ratio, s.hybrid_mlp_ratio)
    fit = all(0.0 <= ratio <= 1.0 for ratio in ratios) and (s.num_layers or 0) > 0
    if s.hybrid_layer_pattern is None and (s.is_hybrid_model or any(ratios)) and fit:
        s.set_derived("hybrid_layer_pattern", evenly_mixed(s.num_layers, *ratios))
        note = f"the layers of the hybrid model are --hybrid-layer-pattern {s.hybrid_layer_pattern}"
    elif s.hybrid_layer_pattern is not None and any(ratios):
        note = "--hybrid-attention-ratio and --hybrid-mlp-ratio: have no effect beside --hybrid-layer-pattern"
    predicting = s.mtp_hybrid_override_pattern
    if predicting is not None and s.hybrid_layer_pattern is not None and not prediction_letters(s.transformer):
        depths = f"{PREDICTION_BORDER}{predicting}" * (s.mtp_num_layers or 1)
        s.set_derived("hybrid_layer_pattern", f"{s.hybrid_layer_pattern}{depths}")
    letters = hybrid_letters(s.transformer)
    if letters is None:
        return note
    if s.mtp_num_layers is None and prediction_letters(s.transformer):
        s.set_derived("mtp_num_layers", len(prediction_letters(s.transformer)))
    if not s.is_hybrid_model:
        s.set_derived("is_hybrid_model", True)
    if s.num_layers is None:
        s.set_derived("num_layers", len(letters))
    if s.pipeline_model_parallel_layout is None and s.pipeline_model_parallel_size > 1:
        s.set_derived("pipeline_model_parallel_layout", stages_of_pattern(s.hybrid_layer_pattern))
    return note


def _described_layers(s: Settings) -> str | None:
    """Replaces the path of a description of layers by the file's content, which checkpoints can keep. The checks report
    a wrong description."""
    given = [field for field in HETEROGENEOUS if getattr(s, field) is not None]
    if not given or None in (s.num_layers, s.hidden_size, s.num_attention_heads):
        return None
    with contextlib.suppress(UserError):
        encoded, path = HETEROGENEOUS
        s.values[encoded] = encoded_layers(s.transformer)
        s.provenance |= {encoded: "flag", path: "derived"}
    if len(given) == 1:
        return None
    return "--heterogeneous-layers-config-path: not read beside --heterogeneous-layers-config-encoded-json"


def _mlp_width(s: Settings) -> None:
    if s.ffn_hidden_size is None and s.hidden_size is not None:
        width = 4 * s.hidden_size
        s.set_derived("ffn_hidden_size", int((width * 2 / 3) / 64) * 64 if s.swiglu else width)


def _heads(s: Settings) -> str | None:
    note = None
    if s.is_given("num_query_groups") and not s.group_query_attention:
        mla = s.multi_latent_attention
        lack = "with --multi-latent-attention" if mla else "without --group-query-attention"
        note = f"--num-query-groups {s.num_query_groups}: has no effect {lack}"
    if s.num_attention_heads is None and not has_heads(s.transformer):
        s.set_derived("num_attention_heads", 1)  # no layer reads it
    sizes_fit = bool(s.hidden_size and s.num_attention_heads) and s.hidden_size % s.num_attention_heads == 0
    if s.kv_channels is None and sizes_fit:
        s.set_derived("kv_channels", s.hidden_size // s.num_attention_heads)
    if not s.group_query_attention:
        s.set_derived("num_query_groups", s.num_attention_heads)
    return note


def _positions(s: Settings) -> None:
    if s.max_position_embeddings is None and s.seq_length is not None:
        written = (s.decoder_seq_length or 0) if s.num_encoder_layers else 0
        s.set_derived("max_position_embeddings", max(s.seq_length, written))


def _latent_attention(s: Settings) -> str | None:
    if not s.multi_latent_attention:
        return None
    if s.rope_type is None:
        s.set_derived("rope_type", "yarn")
    if s.position_embedding_type == "learned_absolute" and not s.is_given("position_embedding_type"):
        return (
            "--multi-latent-attention rotates queries and keys by position, and the default --position-embedding-type "
            "learned_absolute adds learned positions as well; rope or none does not"
        )
    return None


def _no_evaluations(s: Settings) -> str | None:
    if s.eval_iters is None or s.eval_iters >= 0:
        return None
    given = s.eval_iters
    s.set_derived("eval_iters", 0)
    return f"--eval-iters {given}: the run never evaluates, as with 0"


def _number_formats(s: Settings) -> None:
    if s.apply_query_key_layer_scaling:
        s.set_derived("attention_softmax_in_fp32", True)
    if s.use_megatron_fsdp and s.megatron_fsdp_main_grads_dtype == "bf16":
        s.set_derived("main_grads_dtype", torch.bfloat16)
    if s.use_megatron_fsdp and s.megatron_fsdp_main_params_dtype == "fp16":
        s.set_derived("use_precision_aware_optimizer", True)
        s.set_derived("main_params_dtype", torch.float16)
    if (s.fp16 or s.bf16) and not s.grad_reduce_in_bf16 and s.main_grads_dtype is torch.float32:
        s.set_derived("grad_reduce_in_fp32", True)
    if s.use_megatron_fsdp and s.megatron_fsdp_grad_comm_dtype != "auto":
        s.set_derived("grad_reduce_in_fp32", s.megatron_fsdp_grad_comm_dtype == "fp32")


def _ranks(s: Settings) -> str | None:
    note = None
    sizes = s.tensor_model_parallel_size, s.pipeline_model_parallel_size, s.context_parallel_size
    model_size = sizes[0] * sizes[1] * sizes[2]
    least = model_size
    if s.num_moe_experts is not None:  # also a whole number of expert grids
        expert_tensor = s.expert_tensor_parallel_size or sizes[0]
        least = math.lcm(model_size, expert_tensor * s.expert_model_parallel_size * sizes[1])
    if s.use_distributed_optimizer or s.use_megatron_fsdp or s.use_torch_fsdp2:
        least *= max(1, s.num_distributed_optimizer_instances)
    planned = s.planned_world_size
    if planned is not None and s.launch_environment.world_size_is_given and planned != s.world_size:
        note = f"--planned-world-size {planned}: the run has {s.world_size} ranks, and was planned for {planned}"
    if s.dry_run and not s.launch_environment.world_size_is_given and planned is not None:
        s.set_derived("world_size", max(1, planned))
    elif s.dry_run and not s.launch_environment.world_size_is_given and least > 1:
        s.set_derived("world_size", least)
        note = f"--dry-run: for {least} ranks, the fewest for this layout; set WORLD_SIZE=N for another number"
    s.set_derived("data_parallel_size", max(1, s.world_size // model_size) if model_size > 0 else 1)
    return note


def _backend(s: Settings) -> str | None:
    fitting = "nccl" if s.launch_environment.has_cuda else "gloo"
    if s.distributed_backend is None:
        s.set_derived("distributed_backend", fitting)
    elif s.distributed_backend == "nccl" and fitting == "gloo":
        s.set_derived("distributed_backend", "gloo")
        return "--distributed-backend nccl: this machine has no GPU; gloo is used"
    return None


def _parts_of_layers(s: Settings) -> str | None:
    """Reads graphs of parts of layers as graphs of whole micro-batches, which are as fast, where these can be made."""
    if unknown_parts(s.transformer) or not (graph_parts(s.transformer) or s.enable_cuda_graph):
        return None
    reason = next(graph_checks.why_no_graph(s), None)
    if reason is None and not graph_parts(s.transformer):
        return None
    graphs = next(
        (name for name in ("external_cuda_graph", "enable_cuda_graph") if getattr(s, name)), "cuda_graph_impl"
    )
    name = describe_problem(f"{{{graphs}}}", s, spelling_of)
    said = None if reason is None else describe_problem(reason, s, spelling_of)
    s.set_derived("cuda_graph_impl", "none" if said else "local")
    s.set_derived("cuda_graph_scope", "full")
    s.set_derived("cuda_graph_modules", [])
    for field in ("enable_cuda_graph", "external_cuda_graph"):
        s.set_derived(field, False)
    if said:
        return f"{name}: has no effect: {said}; results are the same"
    return f"{name}: read as --cuda-graph-impl local: a graph holds a whole micro-batch, with all parts of its layers"


def _virtual_stages(s: Settings) -> None:
    """Sets the number of model chunks per pipeline stage. Either it has a flag, or the layers of a chunk have one."""
    chunks, each = s.num_virtual_stages_per_pipeline_rank, s.num_layers_per_virtual_pipeline_stage
    several = s.pipeline_model_parallel_size > 1
    if chunks is None and several and (s.num_layers or 0) > 0 and (each or 0) > 0:
        chunks = virtual_stages(s.transformer, each)
    s.set_derived("virtual_pipeline_model_parallel_size", chunks if several and (chunks or 0) > 1 else None)


def _sharding(s: Settings) -> str | None:
    """Translates other flags for a sharding strategy. All strategies except no_shard shard the optimizer's state."""
    note = None
    if s.use_torch_fsdp2 and not s.use_megatron_fsdp:
        s.set_derived("use_megatron_fsdp", True)
        s.set_derived("data_parallel_sharding_strategy", "optim_grads_params")
        note = "--use-torch-fsdp2: read as --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    if s.use_megatron_fsdp and s.data_parallel_sharding_strategy != "no_shard":
        s.set_derived("use_distributed_optimizer", True)
    if s.optimizer == "dist_muon":
        s.set_derived("use_distributed_optimizer", True)
    if s.num_distributed_optimizer_instances > 1 and not s.use_distributed_optimizer:
        note = f"--num-distributed-optimizer-instances {s.num_distributed_optimizer_instances}: has no effect without "
        note += "--use-distributed-optimizer"
        s.set_derived("num_distributed_optimizer_instances", 1)
    return note


def _batch(s: Settings) -> str | None:
    steps = batch_steps(s)
    if steps is not None and s.global_batch_size is None:
        s.set_derived("global_batch_size", steps.steps[-1][1])
    at_a_time = max(1, s.gradient_accumulation_steps or 1) * s.data_parallel_size  # micro-batches of a step
    if s.global_batch_size is None and s.micro_batch_size is not None:
        s.set_derived("global_batch_size", s.micro_batch_size * at_a_time)
    divides = s.gradient_accumulation_steps is not None and (s.global_batch_size or 1) % at_a_time == 0
    if s.micro_batch_size is None and divides:
        s.set_derived("micro_batch_size", s.global_batch_size // at_a_time)
    at_once, size = (s.micro_batch_size or 0) * s.data_parallel_size, s.global_batch_size or 0
    if s.decrease_batch_size_if_needed and 0 < at_once < size and size % at_once:
        return (
            f"--global-batch-size {size} is rounded down to {size - size % at_once}, a multiple of --micro-batch-size "
            f"{s.micro_batch_size} x {s.data_parallel_size} data parallel ranks"
        )
    return None


def _lengths_of_training(s: Settings) -> None:
    if s.train_samples is not None and s.train_iters is None and (s.global_batch_size or 0) > 0:
        s.set_derived("train_iters", _iterations_of_samples(s))
    if s.is_given("train_samples"):
        if s.lr_decay_samples is None:
            s.set_derived("lr_decay_samples", s.train_samples)
    elif s.lr_decay_iters is None:
        s.set_derived("lr_decay_iters", s.train_iters)


def _iterations_of_samples(s: Settings) -> int:
    """Returns the number of steps of --train-samples."""
    if s.micro_batch_size is None:  # the checks ask for it
        return int(s.train_samples // s.global_batch_size)
    try:
        return BatchSchedule.from_config(s, s.data_parallel_size, s.seq_length or 0).iterations_of(s.train_samples)
    except (UserError, ZeroDivisionError):  # the checks report sizes that are impossible
        return int(s.train_samples // s.global_batch_size)


def _data(s: Settings) -> str | None:
    if s.dataloader_type is None:
        s.set_derived("dataloader_type", "single")
    if s.split is None and (s.data_path or s.data_args_path or s.data_stages) is not None:
        s.set_derived("split", DEFAULT_SPLIT)
        return f"no --split given: data is divided into training, validation and test data as {DEFAULT_SPLIT}"
    return None


def _files(s: Settings) -> str | None:
    on_disk = s.save is not None and not is_url(s.save)
    if s.nonfinite_dump_dir is None and on_disk and s.check_for_nan_in_loss_and_grad:
        s.set_derived("nonfinite_dump_dir", f"{s.save.rstrip('/')}/nonfinite")
    if s.metrics_path is None and on_disk:
        s.set_derived("metrics_path", f"{s.save.rstrip('/')}/metrics.jsonl")
    elif s.metrics_path is None:
        if s.save is not None:
            return "--save is in a store and no --metrics-path is given: metrics are printed only"
        return "neither --save nor --metrics-path is given: metrics are printed only"
    return None


def _checkpoint_format(s: Settings) -> str | None:
    if s.ckpt_format != "safetensors":
        given = s.ckpt_format
        s.set_derived("ckpt_format", "safetensors")
        return f"--ckpt-format {given}: checkpoints are written as safetensors, which every layout can load"
    return None


def _recomputation(s: Settings) -> None:
    if s.recompute_activations and s.recompute_granularity is None:
        s.set_derived("recompute_granularity", "selective")


def _kernels(s: Settings) -> str | None:
    if s.transformer_impl != "transformer_engine":
        return None
    found = find_engine()
    reason = found if isinstance(found, str) else why_layers_stay_ours(s.transformer)
    if reason is not None:
        return unused_line(reason)
    used = "--transformer-impl transformer_engine: Transformer Engine"
    but = ", but not products in pieces (--tp-comm-overlap), which are ours" if cuts_products(s.transformer) else ""
    compared = f"{used} computes{but}; our own layers (--transformer-impl auto) are"
    if s.num_moe_experts is not None:
        speed = "MOE64 took 819 ms with it and 632 without; in fp8 (tensorwise) 1121 and 590"
        return f"{compared} faster for experts: on one H200 {speed}"
    speed = "LLAMA1B took 968 ms with it and 964 without; in fp8 (tensorwise) 791 and 781"
    return f"{compared} as fast: on one H200 {speed}"


def _graphs(s: Settings) -> str | None:
    if not captures_micro_batches(s.transformer) or "full_iteration" not in s.cuda_graph_scope:
        return None
    return "--cuda-graph-scope full_iteration: one graph is replayed for each micro-batch of an iteration"


def _local_copies(s: Settings) -> None:
    if s.replication and s.replication_jump is None:
        node = gpus_of_node(s.gpus_per_node, s.launch_environment)
        s.set_derived("replication_jump", node if node is not None and node < s.world_size else 1)


def _other_defaults(s: Settings) -> str | None:
    """Names the defaults in use that differ from Megatron-LM's."""
    ours = {
        "ckpt_format": f"--ckpt-format {s.ckpt_format}",
        "transformer_impl": f"--transformer-impl {s.transformer_impl}",
    }
    if s.optimizer in ("muon", "dist_muon") and s.tensor_model_parallel_size > 1:
        ours["muon_tp_mode"] = f"--muon-tp-mode {s.muon_tp_mode}"
    if not s.launch_environment.has_cuda:
        ours["distributed_backend"] = "--distributed-backend gloo (this machine has no GPU)"
    said = [words for field, words in ours.items() if not s.is_given(field)]
    return f"defaults that differ from Megatron-LM's: {', '.join(said)}" if said else None


_DERIVATIONS: tuple[Callable[[Settings], str | None], ...] = (
    _other_defaults,
    _no_evaluations,
    _encoder_spellings,
    _hybrid,
    _described_layers,
    _mlp_width,
    _heads,
    _positions,
    _latent_attention,
    _number_formats,
    _ranks,
    _backend,
    _parts_of_layers,
    *MEASURED_RULES,
    _virtual_stages,
    _sharding,
    _batch,
    _lengths_of_training,
    _data,
    _files,
    _checkpoint_format,
    _local_copies,
    _recomputation,
    _kernels,
    _graphs,
)
