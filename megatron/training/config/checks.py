"""Rules between the values of a run. Each rule yields a problem for each impossible value: what is wrong, what works.

A problem is a sentence in the grammar of `config_fields`: `{field}` becomes the flag and its value. Rules about one
config dataclass are that class's `validate()`; here are the rules across dataclasses. The docstring of a rule says what
it requires. All rules run, even after others have found problems, so they must accept missing and impossible values.
"""

import math
from collections.abc import Callable, Iterator
from os.path import abspath
from typing import cast

import torch

from megatron.core.declarations import model_parallel_config
from megatron.core.declarations.config_fields import fields_of_problem, literal_text
from megatron.core.ops.transformer_engine.engine import uses_engine
from megatron.core.optimizer import OptimizerConfig, optimizer_config
from megatron.core.transformer.transformer_config import transformer_problems
from megatron.core.utils.stores import StoreError
from megatron.training.config import (
    adapter_checks,
    file_checks,
    graph_checks,
    model_families,
    parallel_checks,
    regrouping_checks,
    schedule_checks,
)
from megatron.training.config.data import DataConfig
from megatron.training.config.model import ACTIVATIONS, ModelConfig
from megatron.training.config.pretrain_config import config_classes
from megatron.training.config.settings import Settings

Rule = Callable[[Settings], Iterator[str]]


def problems_of(settings: Settings) -> list[str]:
    """Returns the problems of all values, in the order of the rules. A problem may come twice.

    Leaves out problems that name derived values only, if there are others: the mistake is in the values from which
    these are derived.
    """
    problems = list(dict.fromkeys(problem for rule in RULES for problem in _problems_of(rule, settings)))
    return [problem for problem in problems if not _names_derived_values_only(problem, settings)] or problems


def _problems_of(rule: Callable[[Settings], Iterator[str]], settings: Settings) -> Iterator[str]:
    """Yields the problems of a rule. A file that the system cannot look at is one: its name is too long, its folder
    closed to this user, or a link leads to itself; or a store does not let us look."""
    try:
        yield from rule(settings)
    except StoreError as error:
        yield literal_text(str(error))
    except OSError as error:
        yield literal_text(f"{error.filename}: {error.strerror}")


def _names_derived_values_only(problem: str, settings: Settings) -> bool:
    fields = fields_of_problem(problem)
    return bool(fields) and all(settings.provenance.get(field) == "derived" for field in fields)


def missing_values(s: Settings) -> Iterator[str]:
    """Yields a problem for each missing value that a training run needs and a dry run does not."""
    if not (s.skip_train or s.loop_of_script):
        yield from missing_schedule(s.lr, s.train_samples if s.train_iters is None else s.train_iters)
    yield from adapter_checks.has_base(s)
    of_script = s.datasets_of_script or s.dataloader_type == "external"
    if not of_script and not s.build(DataConfig).sources():
        yield "{data_path:name} is missing: the prefix of preprocessed data; or --mock-data to try a run without data"


def missing_schedule(lr: float | None, length: int | None) -> Iterator[str]:
    """Yields a problem for each missing value that a schedule needs. `length`: steps or samples of the run. A script
    that writes its own loop may only load a model; its optimizer asks again."""
    if lr is None:
        yield "{lr:name} is missing: the learning rate at the top of the schedule, such as 3e-4"
    if length is None:
        yield "{train_iters:name} or {train_samples:name} is missing: how long to train"


# ---------------------------------------------------------------------------------------------------------------------
# Rules of single dataclasses


def _each_config(s: Settings) -> Iterator[str]:
    """The app's dataclasses are valid."""
    yield from s.build(ModelConfig, transformer=None).validate()
    for config_class in config_classes().values():
        if config_class is not ModelConfig and hasattr(config_class, "validate"):
            yield from s.build(config_class).validate()


def _library(s: Settings) -> Iterator[str]:
    """The library's dataclasses are valid."""
    yield from model_parallel_config.validate(s.transformer)
    yield from transformer_problems(s.transformer)
    yield from optimizer_config.validate(cast(OptimizerConfig, s))


# ---------------------------------------------------------------------------------------------------------------------
# Sizes of the model


def _model_is_described(s: Settings) -> Iterator[str]:
    wanted = {
        "num_layers": "the number of transformer layers, such as 12",
        "hidden_size": "the width of the model, such as 768",
        "num_attention_heads": "the number of attention heads, such as 12",
        "seq_length": "the number of tokens in a sample, such as 1024",
        "micro_batch_size": "the sequences that a rank processes at once, such as 4",
    }
    for field, what in wanted.items():
        if getattr(s, field) is None:
            yield f"{{{field}:name}} is missing: {what}"


def _sizes_are_possible(s: Settings) -> Iterator[str]:
    """No size is one that only a mistake can give. The limits are far above those of any model that was trained; larger
    values would let a run build objects for hours, or end in an error of an allocator."""
    for field, most in _MOST.items():
        value = getattr(s, field)
        if value is not None and value > most:
            yield f"{{{field}}} must be at most {most}"


_MOST = {
    "hidden_size": 1_000_000,
    **dict.fromkeys(("num_moe_experts", "mtp_num_layers"), 100_000),
    **dict.fromkeys(
        (
            *("num_attention_heads", "num_query_groups", "kv_channels"),
            *("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
            *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
            *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
        ),
        10_000_000,
    ),
    **dict.fromkeys(
        ("vocab_size", "make_vocab_size_divisible_by", "seq_length", "decoder_seq_length", "max_position_embeddings"),
        2**31 - 1,
    ),
}
"""For each of these fields the largest value that is accepted."""


def _positions(s: Settings) -> Iterator[str]:
    positions = s.max_position_embeddings
    if s.seq_length is not None and positions is not None and 1 <= positions < s.seq_length:
        yield "{seq_length} is longer than {max_position_embeddings}; raise the latter to at least the former"
    if s.encoder_seq_length is not None and s.seq_length != s.encoder_seq_length:
        yield "{encoder_seq_length} and {seq_length} mean the same and differ; give one"
    if s.encoder_num_layers is not None and not s.num_encoder_layers and s.num_layers != s.encoder_num_layers:
        yield "{encoder_num_layers} and {num_layers} mean the same and differ; give one"


def _rotary(s: Settings) -> Iterator[str]:
    if not 0.0 < s.rotary_percent <= 1.0:
        yield "{rotary_percent} must be larger than 0 and at most 1"
    if not s.rope_scaling_factor > 0:
        yield "{rope_scaling_factor} must be larger than 0"
    if s.multi_latent_attention:
        scalings = [field for field in s.values if field.startswith("rope_scaling_") and field != "rope_scaling_type"]
        for field in (*scalings, "use_rope_scaling", "rotary_seq_len_interpolation_factor"):
            if s.is_given(field):
                yield (
                    f"{{{field}}} does not go with {{multi_latent_attention:name}}; use {{rope_type:name}} yarn for "
                    "longer contexts"
                )
        return
    if s.position_embedding_type != "rope":
        return
    if 0.0 < s.rotary_percent <= 1.0 and s.kv_channels is not None and s.kv_channels > 0:
        rotated = int(s.kv_channels * s.rotary_percent)
        if rotated < 2 or rotated % 2:
            yield (
                f"{{rotary_percent}} of {{kv_channels:name}} {s.kv_channels} rotates {rotated} channels of a head; "
                "the number must be even and at least 2"
            )
    if s.use_rope_scaling and s.rope_scaling_type not in (None, "llama3"):
        yield "{use_rope_scaling} means {rope_scaling_type:name} llama3; it does not go with {rope_scaling_type}"


def _multi_token_prediction(s: Settings) -> Iterator[str]:
    if s.seq_length is not None and s.mtp_num_layers is not None and 1 <= s.seq_length <= s.mtp_num_layers:
        yield ("{mtp_num_layers} must be less than {seq_length}: the predicted tokens must lie inside the sample")


def _gated_mlp(s: Settings) -> Iterator[str]:
    gates = [name for name, activation in ACTIVATIONS.items() if activation.gated]
    if not any(getattr(s, name) for name in gates):
        for field, none in (("glu_linear_offset", 0.0), ("activation_func_clamp_value", None)):
            if getattr(s, field) != none:
                *first, last = (f"{{{name}:name}}" for name in gates)
                yield f"{{{field}}} is for an MLP with a gate; add {', '.join(first)} or {last}"


def _widths(s: Settings) -> Iterator[str]:
    if not s.use_mup:
        return
    for field in ("softmax_scale", "logit_scale", "embedding_multiplier"):
        if s.is_given(field):
            yield f"{{use_mup}} sets {{{field}:name}} itself (--help use_mup); leave it out"
    if s.optimizer not in ("adam", "sgd"):
        yield "{use_mup} has no rule for the learning rates of {optimizer}; adam and sgd work"


def _gradient_types(s: Settings) -> Iterator[str]:
    if s.grad_reduce_in_bf16 and s.is_given("grad_reduce_in_fp32"):
        yield "{grad_reduce_in_bf16} and {grad_reduce_in_fp32} contradict each other; give one"
    if s.main_grads_dtype is torch.bfloat16:
        flag = "megatron_fsdp_main_grads_dtype" if s.use_megatron_fsdp else "main_grads_dtype"
        if not s.bf16:
            yield f"{{{flag}}} is for a model in bfloat16; add {{bf16:name}} or leave it out"
        if not (s.use_megatron_fsdp or s.use_precision_aware_optimizer):
            yield "{main_grads_dtype:name} bf16 needs {use_precision_aware_optimizer:name}; add it, or leave it out"
        if s.is_given("grad_reduce_in_fp32"):
            yield f"{{{flag}}} and {{grad_reduce_in_fp32}} contradict each other; give one"


# ---------------------------------------------------------------------------------------------------------------------
# Data


def _conversations(s: Settings) -> Iterator[str]:
    if s.sft and not s.mock_data and s.tokenizer_type != "SFTTokenizer":
        yield "{sft}: conversations need --tokenizer-type SFTTokenizer"


def _fill_in_the_middle(s: Settings) -> Iterator[str]:
    if s.fim_data and s.sft:
        yield "{fim_data} rearranges plain text and {sft} reads conversations; give one"


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _layout_invariance(s: Settings) -> Iterator[str]:
    """--layout-invariant goes only with settings whose result does not depend on the layout, if the sizes of
    micro-batch and global batch stay the same."""
    if not s.layout_invariant:
        return
    if s.num_moe_experts is not None and "global_aux_loss" in s.moe_router_load_balancing_type:
        yield (
            "{layout_invariant}: global_aux_loss of {moe_router_load_balancing_type} depends on the order in which "
            "data parallel ranks process micro-batches; aux_loss and seq_aux_loss do not"
        )
    if s.global_batch_size is not None and not s.is_given("global_batch_size"):
        yield (
            "{layout_invariant} needs {global_batch_size:name}: without it, the batch grows with the number of data "
            f"parallel ranks; {s.global_batch_size} is the value for this layout"
        )
    shares_micro_batches = (s.tensor_model_parallel_size, s.context_parallel_size) != (1, 1)
    if s.fp8 is not None and s.fp8_recipe in ("blockwise", "mxfp8") and shares_micro_batches:
        yield (
            "{layout_invariant}: {fp8_recipe} cuts each rank's part of a tensor into blocks, which depend on "
            "{tensor_model_parallel_size} and {context_parallel_size}; tensorwise does not"
        )
    if s.fp4 is not None and shares_micro_batches:
        yield (
            "{layout_invariant}: {fp4} cuts each rank's part of a tensor into blocks, which depend on "
            "{tensor_model_parallel_size} and {context_parallel_size}; --fp8-recipe tensorwise does not"
        )
    if s.fp8 is not None and s.transformer_impl == "transformer_engine" and uses_engine(s.transformer):
        yield (
            "{layout_invariant}: with {fp8}, {transformer_impl} computes scales from each rank's values, which depend "
            "on the layout; --transformer-impl auto computes them from whole tensors"
        )
    if s.optimizer in ("muon", "dist_muon") and s.muon_tp_mode == "blockwise" and s.tensor_model_parallel_size != 1:
        yield (
            "{layout_invariant}: {muon_tp_mode} orthogonalises the part of a matrix on each rank, which depends on "
            "{tensor_model_parallel_size}; duplicated and distributed take the whole matrix"
        )
    scaled = {torch.float16: "fp16", torch.uint8: "fp8"} if s.use_precision_aware_optimizer else {}
    for field in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(s, field) in scaled and s.tensor_model_parallel_size != 1:
            yield (
                f"{{layout_invariant}}: {{{field}:name}} {scaled[getattr(s, field)]} has scales for blocks of a rank's "
                "part of a tensor, which depend on {tensor_model_parallel_size}; fp32 and bf16 have none"
            )
    if s.decrease_batch_size_if_needed:
        yield (
            "{layout_invariant}: {decrease_batch_size_if_needed} makes the batch depend on the number of data parallel "
            "ranks; leave it out"
        )


def _external_data(s: Settings) -> Iterator[str]:
    """Nothing needs a script's own iterators to start again or to have a known length."""
    if s.dataloader_type != "external":
        return
    if s.loss_spike_action == "rewind":
        yield "{loss_spike_action} reads data again, which {dataloader_type} cannot; skip works"
    if s.full_validation:
        yield "{full_validation:name} needs data sets, whose length is known; {dataloader_type} has iterables"


def _weight_average(s: Settings) -> Iterator[str]:
    """--ema-decay goes with the other flags."""
    if s.ema_decay is None:
        return
    if s.fp8_param_gather:
        yield "{ema_decay}: an evaluation puts the average in place of weights that {fp8_param_gather} keeps in fp8"
    if s.save is not None and s.no_save_optim:
        yield "{ema_decay}: checkpoints keep the average with the optimizer's state: leave out {no_save_optim:name}"
    if s.eval_fresh_samples:
        yield "{ema_decay} evaluates weights and average on the same samples: leave out {eval_fresh_samples:name}"


def _weight_file(s: Settings) -> Iterator[str]:
    """--param-nvme-offload-path goes with the other flags."""
    if s.param_nvme_offload_path is None:
        return
    if s.data_parallel_size * s.context_parallel_size <= s.num_distributed_optimizer_instances:
        yield "{param_nvme_offload_path} keeps weights that ranks share: give at least two data parallel ranks"
    if s.ema_decay is not None:
        yield "{param_nvme_offload_path}: an evaluation exchanges all weights for the average: leave out {ema_decay}"
    if s.optimizer in ("muon", "dist_muon"):
        yield "{param_nvme_offload_path}: {optimizer} updates whole matrices of all layers at once; adam and sgd work"
    if s.qk_clip:
        yield "{param_nvme_offload_path}: {qk_clip:name} scales weights after the updates of all layers; leave one out"
    if s.fp8_param_gather:
        yield "{param_nvme_offload_path}: weights in fp8 stay in memory; leave out {fp8_param_gather:name}"
    if s.moe_use_upcycling:
        yield "{param_nvme_offload_path}: {moe_use_upcycling:name} writes to weights in memory; upcycle in another run"
    if s.use_precision_aware_optimizer and s.bf16 and s.main_params_dtype is torch.float32:
        yield (
            "{param_nvme_offload_path}: {use_precision_aware_optimizer:name} keeps main weights as the difference to "
            "weights in memory: leave it out, or give {main_params_dtype:name} fp16"
        )


def _rewinds(s: Settings) -> Iterator[str]:
    """--loss-spike-action rewind has whole checkpoints to go back to."""
    if s.loss_spike_action != "rewind":
        return
    if s.save is None or s.save_interval is None:
        yield "{loss_spike_action} goes back to a checkpoint: give {save:name} and {save_interval:name}"
    elif s.keep_last is not None or s.save_retain_interval is not None:
        yield from _checkpoint_before_the_window(s)
    if s.no_save_optim or s.no_load_optim:
        yield "{loss_spike_action} loads the optimizer's state: leave out {no_save_optim:name} and {no_load_optim:name}"


def _checkpoint_before_the_window(s: Settings) -> Iterator[str]:
    """The oldest kept checkpoint is from before the window of every spike. With N kept, it is nearest to a spike in
    the first iteration after a save: N - 1 intervals before it."""
    interval, window = max(s.save_interval, 1), s.loss_spike_rewind_window
    needed = 1 + math.ceil((window - 1) / interval)
    if (s.keep_last or 1) < needed:
        given = "{keep_last}" if s.keep_last is not None else "{save_retain_interval}"
        yield (
            f"{given} may keep no checkpoint from before {{loss_spike_rewind_window}} to go back to "
            f"({{loss_spike_action}}); with {{save_interval}} give {{keep_last:name}} {needed} or more"
        )


def _numbers_are_finite(s: Settings) -> Iterator[str]:
    for field, value in s.values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{{{field}}} must be a finite number"


def _upcycling(s: Settings) -> Iterator[str]:
    """Upcycling has a dense checkpoint to read, and another folder to write to."""
    if not s.moe_use_upcycling:
        return
    if s.load is None and s.pretrained_checkpoint is None:
        yield "{moe_use_upcycling:name} needs {load:name}: the folder of the dense checkpoint that becomes experts"
    elif s.save is not None and abspath(s.save) == abspath(s.load or s.pretrained_checkpoint):
        yield (
            "{moe_use_upcycling:name} reads a dense checkpoint and writes another model: {save} must not be the folder "
            "that is read"
        )
    if s.load_hf is not None:
        yield (
            "{load_hf:name} does not go with {moe_use_upcycling:name}, which reads a checkpoint: convert the model "
            "with tools/checkpoint/convert.py import, and give the result as {load:name}"
        )


RULES: tuple[Rule, ...] = (
    _model_is_described,
    _sizes_are_possible,
    _each_config,
    file_checks.split_has_training_data,
    file_checks.validation_sets,
    _positions,
    _rotary,
    _multi_token_prediction,
    _gated_mlp,
    _widths,
    _gradient_types,
    _library,
    model_families.of_recipe,
    model_families.masked_words,
    model_families.bert,
    model_families.encoder_and_decoder,
    model_families.one_stack,
    model_families.layers_of_spec,
    parallel_checks.ranks,
    parallel_checks.ranks_of_experts,
    parallel_checks.ranks_of_nodes,
    parallel_checks.copies_of_state,
    parallel_checks.tensor_parallel_groups,
    parallel_checks.sequence_length,
    parallel_checks.virtual_stages,
    parallel_checks.sharding,
    schedule_checks.global_batch,
    schedule_checks.evaluation_batch,
    _conversations,
    _fill_in_the_middle,
    schedule_checks.length_of_training,
    schedule_checks.samples_of_run,
    schedule_checks.one_unit_of_schedule,
    schedule_checks.warmup,
    schedule_checks.end_decay,
    schedule_checks.weight_decay,
    _upcycling,
    adapter_checks.goes_with,
    file_checks.paths_are_not_empty,
    file_checks.files_exist,
    file_checks.evaluation_tasks,
    file_checks.settings_of_communicators,
    file_checks.checkpoints_in_a_store,
    file_checks.data_in_object_stores,
    file_checks.folders_are_folders,
    file_checks.folders_can_be_written,
    file_checks.checkpoint_folders_exist,
    file_checks.checkpoint_can_be_selected,
    graph_checks.micro_batch_graphs,
    _layout_invariance,
    parallel_checks.exact_sums,
    regrouping_checks.regrouped_ranks,
    _external_data,
    _rewinds,
    _weight_average,
    _weight_file,
    _numbers_are_finite,
)
