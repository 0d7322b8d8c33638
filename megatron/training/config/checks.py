"""Rules between values: what cannot be, and the nearest that can.

Each rule looks at one thing and yields a problem in the grammar of `config_fields`; `{field}` becomes the flag and its
value. All rules run, whatever the others found, so they must bear missing and impossible values.
"""

import math
import signal
from collections.abc import Callable, Iterator

from megatron.core.model_parallel_config import parallel_problems
from megatron.core.optimizer.optimizer_config import optimizer_problems
from megatron.core.transformer.transformer_config import transformer_problems
from megatron.training.config import data_checks, parallel_checks
from megatron.training.config.settings import Settings

Rule = Callable[[Settings], Iterator[str]]


def problems_of(settings: Settings) -> Iterator[str]:
    """Everything that is wrong with the values, in the order of the rules; duplicates are possible."""
    for rule in RULES:
        yield from rule(settings)


def missing_of(s: Settings) -> Iterator[str]:
    """What a run needs and nobody gave, beyond what describes the model."""
    if s.lr is None and not s.skip_train:
        yield "{lr:name} is missing: the learning rate at the top of the schedule, such as 3e-4"
    if s.train_iters is None and s.train_samples is None and not s.skip_train:
        yield "{train_iters:name} or {train_samples:name} is missing: how long to train"
    if not data_checks.sources(s):
        yield "{data_path:name} is missing: the prefix of preprocessed data; or --mock-data to try a run without any"


# ---------------------------------------------------------------------------------------------------------------------
# Sizes of the model


def _model_is_described(s: Settings) -> Iterator[str]:
    wanted = {
        "num_layers": "the number of transformer layers, such as 12",
        "hidden_size": "the width of the model, such as 768",
        "num_attention_heads": "the number of attention heads, such as 12",
        "seq_length": "tokens of a sample, such as 1024",
        "micro_batch_size": "sequences that a rank takes at once, such as 4",
    }
    for field, what in wanted.items():
        if getattr(s, field) is None:
            yield f"{{{field}:name}} is missing: {what}"


def _positive(s: Settings) -> Iterator[str]:
    for field in _POSITIVE:
        value = getattr(s, field)
        if value is not None and value < 1 and s.provenance[field] != "derived":
            yield f"{{{field}}} must be at least 1"
    for field in _NOT_NEGATIVE:
        value = getattr(s, field)
        if value is not None and value < 0:
            yield f"{{{field}}} must be at least 0"


_POSITIVE = (
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "train_samples",
    "eval_interval",
    "log_interval",
    "tensorboard_log_interval",
    "tensorboard_queue_size",
    "save_interval",
    "keep_last",
    "exit_interval",
    "exit_duration_in_mins",
    "distributed_timeout_minutes",
    "make_vocab_size_divisible_by",
    "num_dataset_builder_threads",
    "lr_decay_iters",
    "lr_decay_samples",
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
)
_NOT_NEGATIVE = (
    "eval_iters",
    "num_workers",
    "manual_gc_interval",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_init",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "mid_level_dataset_surplus",
    "start_weight_decay",
    "end_weight_decay",
    "profile_step_start",
    "ckpt_step",
)


def _positions(s: Settings) -> Iterator[str]:
    if s.seq_length is not None and s.max_position_embeddings is not None and s.seq_length > s.max_position_embeddings:
        yield "{seq_length} is longer than {max_position_embeddings}; raise the latter to at least the former"
    if s.encoder_seq_length is not None and s.seq_length != s.encoder_seq_length:
        yield "{encoder_seq_length} and {seq_length} are two names of one length; give one"
    if s.encoder_num_layers is not None and s.num_layers != s.encoder_num_layers:
        yield "{encoder_num_layers} and {num_layers} are two names of one number; give one"


def _rotary(s: Settings) -> Iterator[str]:
    if s.multi_latent_attention:
        scalings = [field for field in s.values if field.startswith("rope_scaling_") and field != "rope_scaling_type"]
        for field in (*scalings, "use_rope_scaling", "rotary_seq_len_interpolation_factor"):
            if s.is_given(field):
                yield f"{{{field}}} does not go with {{multi_latent_attention:name}}; {{rope_type:name}} yarn scales"
        return
    if s.position_embedding_type != "rope":
        return
    if not 0.0 < s.rotary_percent <= 1.0:
        yield "{rotary_percent} must be larger than 0 and at most 1"
    elif s.kv_channels is not None and s.kv_channels > 0:
        turned = int(s.kv_channels * s.rotary_percent)
        if turned < 2 or turned % 2:
            yield (
                f"{{rotary_percent}} of {{kv_channels:name}} {s.kv_channels} turns {turned} channels of a head; "
                "it must be an even number"
            )
    if not s.rope_scaling_factor > 0:
        yield "{rope_scaling_factor} must be larger than 0"
    if s.use_rope_scaling and s.rope_scaling_type not in (None, "llama3"):
        yield "{use_rope_scaling} is {rope_scaling_type:name} llama3; it does not go with {rope_scaling_type}"


def _tokens_ahead(s: Settings) -> Iterator[str]:
    if s.seq_length is not None and s.mtp_num_layers is not None and 1 <= s.seq_length <= s.mtp_num_layers:
        yield (
            "{mtp_num_layers} must be less than {seq_length}: a sample has no token so many places further on than the "
            "next one"
        )


_ACTIVATIONS = ("swiglu", "squared_relu", "quick_geglu", "geglu", "openai_gelu")


def _one_activation(s: Settings) -> Iterator[str]:
    given = [f"{{{field}}}" for field in _ACTIVATIONS if getattr(s, field)]
    if len(given) > 1:
        yield f"{' and '.join(given)} choose different activations; give one"
    if not (s.swiglu or s.quick_geglu or s.geglu):
        for field, none in (("glu_linear_offset", 0.0), ("activation_func_clamp_value", None)):
            if getattr(s, field) != none:
                gates = "{swiglu:name}, {geglu:name} or {quick_geglu:name}"
                yield f"{{{field}}} is for an MLP with a gate; add {gates}"


def _gradient_types(s: Settings) -> Iterator[str]:
    if s.grad_reduce_in_bf16 and s.is_given("grad_reduce_in_fp32"):
        yield "{grad_reduce_in_bf16} and {grad_reduce_in_fp32} contradict each other; give one"


def _library(s: Settings) -> Iterator[str]:
    yield from parallel_problems(s)
    yield from transformer_problems(s)
    yield from optimizer_problems(s)


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def _global_batch(s: Settings) -> Iterator[str]:
    micro, total = s.micro_batch_size, s.global_batch_size
    if not micro or micro < 1 or not total or total < 1:
        return
    step = micro * s.data_parallel_size
    sizes = [("{global_batch_size}", total)]
    if s.rampup_batch_size is not None and min(s.rampup_batch_size) > 0:
        start, increment, _ = s.rampup_batch_size
        sizes += [
            (f"the batch size {size} of {{rampup_batch_size:name}}", size) for size in range(start, total, increment)
        ]
    for name, size in sizes:
        if s.decrease_batch_size_if_needed and size >= step:
            continue
        if size % step:
            works = " or ".join(str(near) for near in (size - size % step, size - size % step + step) if near > 0)
            yield (
                f"{name} does not divide by {{micro_batch_size}} x {s.data_parallel_size} data parallel ranks; "
                f"{works} does"
            )
            return


def _batch_ramp(s: Settings) -> Iterator[str]:
    if s.rampup_batch_size is None:
        return
    start, increment, samples = s.rampup_batch_size
    if min(start, increment, samples) < 1:
        yield "{rampup_batch_size}: start, increment and samples must be at least 1"
        return
    if not s.is_given("train_samples"):
        yield "{rampup_batch_size} counts in samples; give {train_samples:name} instead of {train_iters:name}"
    if s.global_batch_size is None:
        return
    if start >= s.global_batch_size:
        yield "{rampup_batch_size} begins at or above {global_batch_size}; begin below it"
    elif (s.global_batch_size - start) % increment:
        near = s.global_batch_size - (s.global_batch_size - start) % increment
        yield (
            f"{{rampup_batch_size}}: from {start} in steps of {increment} the batch does not reach "
            f"{{global_batch_size}}; it reaches {near} or {near + increment}"
        )


def _length_of_training(s: Settings) -> Iterator[str]:
    if s.is_given("train_iters") and s.is_given("train_samples"):
        yield "{train_iters} and {train_samples} say how long to train in two ways; give one"
    total, size = s.train_samples, s.global_batch_size
    if s.is_given("train_samples") and total is not None and size is not None and 0 < total < size:
        yield "{train_samples} is less than one batch of {global_batch_size}"


# ---------------------------------------------------------------------------------------------------------------------
# Schedule


def _one_unit_of_schedule(s: Settings) -> Iterator[str]:
    """A run counts its schedule in iterations or in samples, as its length is given."""
    by_samples = s.is_given("train_samples")
    of_other_kind = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
    mine = "train_samples"
    if not by_samples:
        of_other_kind = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
        mine = "train_iters"
    for field in of_other_kind:
        if s.is_given(field) and getattr(s, field):
            other = field.replace("iters", "samples") if by_samples else field.replace("samples", "iters")
            yield f"{{{field}}} does not go with {{{mine}:name}}; give {{{other}:name}}"


def _warmup(s: Settings) -> Iterator[str]:
    steps = [field for field in ("lr_warmup_iters", "lr_warmup_samples") if getattr(s, field)]
    if s.lr_warmup_fraction is not None:
        if not 0.0 <= s.lr_warmup_fraction <= 1.0:
            yield "{lr_warmup_fraction} must be from 0 to 1"
        for field in steps:
            yield f"{{lr_warmup_fraction}} and {{{field}}} say how long to warm up in two ways; give one"
    elif len(steps) == 2:
        yield "{lr_warmup_iters} and {lr_warmup_samples} say how long to warm up in two ways; give one"
    for unit in ("iters", "samples"):
        warmup, decay = f"lr_warmup_{unit}", f"lr_decay_{unit}"
        total = getattr(s, decay)
        if total is not None and getattr(s, warmup) >= max(total, 1):
            length = decay if s.is_given(decay) else f"train_{unit}"
            yield f"{{{warmup}}} leaves nothing of {{{length}}} to decay over; it must be less"
    if s.lr is not None and 0 <= s.lr < s.lr_warmup_init:
        yield "{lr_warmup_init} is larger than {lr}"


def _end_decay(s: Settings) -> Iterator[str]:
    if s.lr_decay_style == "WSD":
        field = "lr_wsd_decay_samples" if s.is_given("train_samples") else "lr_wsd_decay_iters"
        if getattr(s, field) is None:
            yield f"{{lr_decay_style}} needs {{{field}:name}}: how long the decay at the end is"


def _weight_decay(s: Settings) -> Iterator[str]:
    ends = ("start_weight_decay", "end_weight_decay")
    if s.weight_decay_incr_style == "constant":
        for field in ends:
            if getattr(s, field) is not None and getattr(s, field) != s.weight_decay:
                yield f"{{{field}}} needs {{weight_decay_incr_style:name}} linear or cosine, or to be {{weight_decay}}"
    else:
        for field in ends:
            if getattr(s, field) is None:
                yield f"{{weight_decay_incr_style}} needs {{{field}:name}}"
        if all(getattr(s, field) is not None for field in ends) and s.end_weight_decay < s.start_weight_decay:
            yield "{end_weight_decay} is less than {start_weight_decay}; weight decay can only grow"


def _one_schedule(s: Settings) -> Iterator[str]:
    if s.override_opt_param_scheduler and s.use_checkpoint_opt_param_scheduler:
        yield "{override_opt_param_scheduler} and {use_checkpoint_opt_param_scheduler} contradict each other; give one"


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _nothing_to_do(s: Settings) -> Iterator[str]:
    if s.skip_train and s.eval_iters == 0:
        yield "{skip_train} with {eval_iters} leaves nothing to do"


def _exit_signal(s: Settings) -> Iterator[str]:
    if s.exit_signal in (signal.SIGKILL, signal.SIGSTOP):
        yield "{exit_signal} cannot be caught by any program; SIGTERM or SIGUSR1 can"


def _profile(s: Settings) -> Iterator[str]:
    if s.profile and s.profile_step_end <= s.profile_step_start:
        yield "{profile_step_end} must be larger than {profile_step_start}"


def _layout_invariance(s: Settings) -> Iterator[str]:
    """The mean over micro-batches depends on how samples are spread, and a balance that looks at what was seen so far
    on the order in which they come."""
    masked = s.eod_mask_loss
    if s.layout_invariant and masked and not s.calculate_per_token_loss:
        yield (
            "{layout_invariant}: {eod_mask_loss} leaves micro-batches different numbers of tokens, over which the loss "
            "is averaged first; add {calculate_per_token_loss:name}"
        )
    if s.layout_invariant and s.num_moe_experts is not None and "global_aux_loss" in s.moe_router_load_balancing_type:
        yield (
            "{layout_invariant}: global_aux_loss of {moe_router_load_balancing_type} depends on the order in which "
            "data parallel ranks see micro-batches; aux_loss and seq_aux_loss do not"
        )


def _numbers_are_finite(s: Settings) -> Iterator[str]:
    for field, value in s.values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{{{field}}} must be a finite number"


RULES: tuple[Rule, ...] = (
    _model_is_described,
    _positive,
    _positions,
    _rotary,
    _tokens_ahead,
    _one_activation,
    _gradient_types,
    _library,
    parallel_checks.ranks,
    parallel_checks.ranks_of_experts,
    parallel_checks.parts_of_a_sequence,
    parallel_checks.virtual_stages,
    parallel_checks.sharding,
    _global_batch,
    _batch_ramp,
    _length_of_training,
    _one_unit_of_schedule,
    _warmup,
    _end_decay,
    _weight_decay,
    _one_schedule,
    data_checks.one_source,
    data_checks.split,
    data_checks.files_are_there,
    data_checks.loading,
    data_checks.checkpoints_are_there,
    _nothing_to_do,
    _exit_signal,
    _profile,
    _layout_invariance,
    _numbers_are_finite,
)
