"""The fields of TrainingArguments of Transformers, and how each is answered; release 5.24 has these."""

import math
from collections.abc import Mapping
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.training.config.foreign.accelerate import read_accelerate
from megatron.training.config.foreign.answers import (
    Answer,
    Reading,
    Values,
    accepted,
    answers_of,
    becomes,
    fields,
    number,
    read_by,
    refused,
    shown,
    switch,
    whole,
    words,
)
from megatron.training.config.foreign.deepspeed import read_deepspeed, read_deepspeed_file

_SAME = "the result is the same"
_LOOP = "the training loop is ours"
_HUB = "nothing is uploaded; save_model writes a folder that `hf upload` takes"

_WITHOUT_WORDS = "true"


def _fsdp_words(value: object) -> list[str]:
    """Returns the words of `fsdp`; true has none of its own."""
    if isinstance(value, bool):
        return [_WITHOUT_WORDS] if value else []
    return words(value)


def _attributes(value: object) -> Values:
    return fields(value if isinstance(value, Mapping) else getattr(value, "__dict__", value))


TRAINING_ARGUMENTS: dict[str, Answer] = {
    "output_dir": read_by("`--save output_dir/checkpoints`, and the place of metrics"),
    "per_device_train_batch_size": becomes("micro_batch_size", whole),
    "per_device_eval_batch_size": becomes("eval_micro_batch_size", whole),
    "gradient_accumulation_steps": becomes("gradient_accumulation_steps", whole),
    "num_train_epochs": read_by("`--train-iters`: epochs x samples / global batch size, rounded up", number),
    "max_steps": read_by("`--train-iters`, if above 0", whole),
    "learning_rate": becomes("lr", number),
    "lr_scheduler_type": read_by(
        "`--lr-decay-style`: linear, cosine, cosine_with_min_lr, constant, constant_with_warmup, inverse_sqrt; others "
        "are refused by name"
    ),
    "lr_scheduler_kwargs": read_by("min_lr and min_lr_rate: `--min-lr`; others are refused by name", fields),
    "warmup_steps": read_by("`--lr-warmup-iters`; below 1 `--lr-warmup-fraction`", number),
    "optim": read_by("AdamW in every implementation: `--optimizer adam`; sgd: `--optimizer sgd`; others are refused"),
    "optim_args": refused("--help optimizer lists the settings of the optimizer: give them as flags", ""),
    "optim_target_modules": refused("all matrices are trained in one way"),
    "weight_decay": becomes("weight_decay", number),
    "adam_beta1": becomes("adam_beta1", number),
    "adam_beta2": becomes("adam_beta2", number),
    "adam_epsilon": becomes("adam_eps", number),
    "max_grad_norm": becomes("clip_grad", number),
    "average_tokens_across_devices": becomes("calculate_per_token_loss", switch),
    "label_smoothing_factor": refused("losses are not smoothed", 0, 0.0),
    "neftune_noise_alpha": refused("embeddings get no noise"),
    "bf16": becomes("bf16", switch),
    "fp16": becomes("fp16", switch),
    "gradient_checkpointing": read_by(
        "`--recompute-granularity full --recompute-method uniform` for each layer", switch
    ),
    "activation_checkpointing": read_by("as `gradient_checkpointing`", switch),
    "logging_steps": read_by("`--log-interval`; below 1 it is a share of the steps", number),
    "logging_strategy": read_by("steps; epoch: `--log-interval` of an epoch; no: one line at the end"),
    "report_to": read_by(
        "tensorboard: `--tensorboard-dir output_dir/runs`; wandb: `--wandb-project`; mlflow, comet_ml: `--log-to`; "
        "others are refused by name",
        words,
    ),
    "run_name": read_by("`--wandb-exp-name`"),
    "project": read_by("`--wandb-project`"),
    "eval_strategy": read_by("`--eval-interval`: steps or epoch; no: only `evaluate()`"),
    "eval_steps": read_by(
        "`--eval-interval`; logging_steps if it is not given; below 1 it is a share of the steps", number
    ),
    "eval_delay": read_by("`--start-eval-at-iter`", number),
    "save_strategy": read_by(
        "`--save-interval`: steps or epoch; no: one checkpoint at the end, which save_model reads"
    ),
    "save_steps": read_by("`--save-interval`; below 1 it is a share of the steps", number),
    "save_total_limit": becomes("keep_last", whole),
    "save_only_model": becomes("no_save_optim", switch),
    "seed": becomes("seed", whole),
    "data_seed": refused("--seed is also that of the order of samples"),
    "full_determinism": becomes("deterministic_mode", switch),
    "dataloader_num_workers": becomes("num_workers", whole),
    "train_sampling_strategy": read_by("random: `--dataloader-type cyclic`; sequential: the data set's own order"),
    "ddp_timeout": read_by("`--distributed-timeout-minutes`, rounded up", number),
    "ddp_backend": becomes("distributed_backend"),
    "fsdp": read_by(
        "as `fsdp_config.sharding_strategy` of `--accelerate-config`; offload moves the optimizer's state", _fsdp_words
    ),
    "fsdp_config": read_by("as `fsdp_config` of `--accelerate-config`", fields),
    "deepspeed": read_by("`--deepspeed-config`; also a dict"),
    "parallelism_config": read_by("as `parallelism_config` of `--accelerate-config`", _attributes),
    "resume_from_checkpoint": read_by("`--load`; `train(resume_from_checkpoint=True)` continues in output_dir"),
    "eval_on_start": refused("an evaluation before the first step is `evaluate()` before `train()`"),
    "load_best_model_at_end": refused("the last weights are kept; --save-retain-interval keeps older checkpoints"),
    "auto_find_batch_size": refused("--dry-run says which batch fits into memory"),
    "ignore_data_skip": refused("a resumed run continues with the samples that it has not seen"),
    "include_for_metrics": refused("the loop has losses, not logits: --eval-tasks scores tasks"),
    "batch_eval_metrics": refused("the loop has losses, not logits: --eval-tasks scores tasks"),
    "debug": refused("a non-finite value is found and printed without it", "", []),
    "use_cache": accepted("training keeps no keys and values"),
    "bf16_full_eval": accepted("an evaluation computes as training does"),
    "fp16_full_eval": accepted("an evaluation computes as training does"),
    "metric_for_best_model": accepted("it is about load_best_model_at_end"),
    "greater_is_better": accepted("it is about load_best_model_at_end"),
    "length_column_name": accepted("it is about grouping by length", "length"),
    "logging_first_step": accepted("the metrics file has every step"),
    "logging_nan_inf_filter": accepted("losses are logged as they are", True),
    "label_names": accepted("the labels are those of the next token", ["labels"]),
    "remove_unused_columns": accepted("input_ids, labels and attention_mask are read", True),
    "local_rank": accepted("torchrun sets the environment variable LOCAL_RANK", -1),
    "dataloader_drop_last": accepted("every batch is full: an epoch's rest continues with the next epoch"),
    **answers_of(refused(_HUB), "push_to_hub hub_always_push"),
    **answers_of(
        accepted(_HUB, "every_save"),
        "hub_token hub_private_repo hub_model_id hub_strategy hub_revision",
    ),
    **answers_of(accepted("it is about Trackio"), "trackio_space_id trackio_bucket_id trackio_static_space_id"),
    **answers_of(
        accepted(f"our own kernels compute, and {_SAME}"),
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config tf32",
    ),
    **answers_of(
        accepted("--recompute-granularity and its flags say what is recomputed"),
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
    ),
    **answers_of(
        accepted(f"buffers and loaders are ours, and {_SAME}", True, 25),
        "torch_empty_cache_steps dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order ddp_find_unused_parameters ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_static_graph eval_accumulation_steps accelerator_config",
    ),
    **answers_of(
        accepted(_LOOP, True, "passive", "warning", "no"),
        "disable_tqdm log_level log_level_replica log_on_each_node include_num_input_tokens_seen prediction_loss_only "
        "eval_do_concat_batches eval_use_gather_object save_on_each_node enable_jit_checkpoint "
        "restore_callback_states_from_checkpoint skip_memory_metrics do_train do_eval do_predict use_cpu",
    ),
}

_STYLES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
}
_QUIET = ("accelerator_config", "disable_tqdm", "hub_token")
"""Fields that always have a value, so that a line about them says nothing."""
_SERVICES = {"mlflow": "mlflow", "comet_ml": "comet", "comet": "comet"}


def read_training_arguments(arguments: object, samples: int | None, ranks: int) -> Reading:
    """Returns what TrainingArguments say, or any object with attributes of the same names.

    `samples` is the number of training samples (None: max_steps must be given), `ranks` the number of data parallel
    ranks.
    """
    reading = Reading("TrainingArguments")
    values: dict[str, object] = {}
    for name in TRAINING_ARGUMENTS:
        if hasattr(arguments, name) and name not in _QUIET:
            usable = reading.answer(name, _plain(getattr(arguments, name)), TRAINING_ARGUMENTS)
            values |= {} if usable is None else {name: usable}
    for read in (_lengths, _schedule, _optimizer, _recomputation, _services, _sharding):
        try:
            read(reading, values, samples, ranks)
        except UserError as error:
            reading.problems.append(str(error) if str(error).startswith("Tr") else f"{reading.source}: {error}")
    return reading


def _plain(value: object) -> object:
    """Returns the value of an enum member, and the value itself otherwise."""
    return getattr(value, "value", value) if isinstance(value, str) else value


def _lengths(reading: Reading, values: Values, samples: int | None, ranks: int) -> None:
    """Steps of training, and intervals in steps, of an epoch or as a share of the steps."""
    batch = values.get("per_device_train_batch_size", 8) * values.get("gradient_accumulation_steps", 1) * ranks
    epoch = None if samples is None else samples / max(1, batch)  # a batch of 0 is a mistake of its flag
    steps = values.get("max_steps", -1)
    name = "max_steps" if steps > 0 else "num_train_epochs"
    if steps <= 0:
        if epoch is None:
            raise UserError("max_steps: the data has no length here, so give the number of steps")
        steps = max(1, math.ceil(values.get("num_train_epochs", 3.0) * epoch))
    reading.take(name, "train_iters", steps)

    def interval(what: str, length: float) -> int:
        if _plain(values.get(f"{what}_strategy", "steps")) == "epoch":
            if epoch is None:
                raise UserError(f"{what}_strategy epoch: the data has no length here, so give steps")
            return max(1, math.ceil(epoch))
        return max(1, math.ceil(length * steps) if 0 < length < 1 else int(length))

    every = interval("logging", values.get("logging_steps", 500))
    quiet = _plain(values.get("logging_strategy")) == "no"
    reading.take("logging_steps", "log_interval", steps if quiet else min(every, steps))
    if _plain(values.get("eval_strategy", "no")) != "no":
        reading.take("eval_steps", "eval_interval", interval("eval", values.get("eval_steps") or every))
        if values.get("eval_delay"):
            reading.take("eval_delay", "start_eval_at_iter", math.ceil(values["eval_delay"]))
    strategy = _plain(values.get("save_strategy", "steps"))
    if strategy == "best":
        reading.refuse("save_strategy best", "checkpoints are saved at steps: steps, epoch and no work")
    elif strategy != "no":
        reading.take("save_steps", "save_interval", interval("save", values.get("save_steps", 500)))
    if values.get("ddp_timeout") is not None:
        reading.take("ddp_timeout", "distributed_timeout_minutes", math.ceil(values["ddp_timeout"] / 60))


def _schedule(reading: Reading, values: Values, *_: object) -> None:
    kind = str(_plain(values.get("lr_scheduler_type", "linear")))
    if kind not in _STYLES:
        raise UserError(f"lr_scheduler_type {kind}: there is no such schedule; {', '.join(_STYLES)} work")
    reading.take("lr_scheduler_type", "lr_decay_style", _STYLES[kind])
    rate, least = values.get("learning_rate", 5e-5), 0.0
    for name, value in (values.get("lr_scheduler_kwargs") or {}).items():
        if name not in ("min_lr", "min_lr_rate"):
            raise UserError(f"lr_scheduler_kwargs {name} {shown(value)}: min_lr and min_lr_rate work")
        try:
            least = number(value) * (1.0 if name == "min_lr" else rate)
        except ValueError as error:
            raise UserError(f"lr_scheduler_kwargs {name} {shown(value)}: {error}") from None
    reading.take("lr_scheduler_kwargs", "min_lr", least)
    warmup = values.get("warmup_steps") or 0
    if warmup and kind != "constant":
        field = "lr_warmup_iters" if warmup >= 1 else "lr_warmup_fraction"
        reading.take("warmup_steps", field, int(warmup) if warmup >= 1 else warmup)


def _optimizer(reading: Reading, values: Values, *_: object) -> None:
    kind = str(_plain(values.get("optim", "adamw_torch")))
    if kind.endswith("bit"):
        raise UserError(
            f"optim {kind}: adamw_torch works, and --use-precision-aware-optimizer keeps moments in fewer bits"
        )
    if kind.startswith("adamw_") and kind.split("_")[1] in ("torch", "hf", "apex", "anyprecision"):
        reading.take("optim", "optimizer", "adam")
    elif kind == "sgd":
        reading.take("optim", "optimizer", "sgd")
        reading.take("optim", "sgd_momentum", 0.0)
    else:
        raise UserError(f"optim {kind}: adamw_torch and sgd work, and --optimizer muon among the flags")
    strategy = _plain(values.get("train_sampling_strategy", "random"))
    if strategy not in ("random", "sequential"):
        raise UserError(f"train_sampling_strategy {shown(strategy)}: random and sequential work")
    reading.take("train_sampling_strategy", "dataloader_type", {"random": "cyclic"}.get(strategy, "single"))


def _recomputation(reading: Reading, values: Values, *_: object) -> None:
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if values.get(name) is True:
            reading.take(name, "recompute_granularity", "full")
            reading.take(name, "recompute_method", "uniform")
            reading.take(name, "recompute_num_layers", 1)


def _services(reading: Reading, values: Values, *_: object) -> None:
    for service in values.get("report_to", []):
        if service == "tensorboard":
            reading.take("report_to", "tensorboard_dir", str(Path(str(values.get("output_dir") or ".")) / "runs"))
        elif service == "wandb":
            project = values.get("project") or "huggingface"
            reading.take("project", "wandb_project", project)
            reading.take("run_name", "wandb_exp_name", values.get("run_name") or str(values.get("output_dir")))
        elif service in _SERVICES:
            reading.take("report_to", "log_to", [_SERVICES[service]])
        elif service != "none":
            raise UserError(f"report_to {service}: tensorboard, wandb, mlflow, comet_ml and none work")


def _sharding(reading: Reading, values: Values, *_: object) -> None:
    """DeepSpeed, FSDP and the axes of parallelism, in their own readers."""
    given = values.get("deepspeed")
    if isinstance(given, Mapping):
        reading.include(read_deepspeed(given, f"{reading.source}: deepspeed"))
    elif given is not None:
        reading.include(read_deepspeed_file(f"{reading.source}: deepspeed", str(given)))
    sharding = values.get("fsdp", [])
    names = [word for word in sharding if word not in ("offload", "auto_wrap", _WITHOUT_WORDS)]
    section = dict(values.get("fsdp_config", {}))
    if names:
        section.setdefault("sharding_strategy", names[0])
    if sharding:
        offload = {"offload_params": True} if "offload" in sharding else {}
        named = {name.removeprefix("fsdp_"): value for name, value in section.items()}
        known = {"sharding_strategy": "FULL_SHARD"} if "reshard_after_forward" not in named else {}
        config = {"distributed_type": "FSDP", "fsdp_config": known | named | offload}
        reading.include(read_accelerate(config, f"{reading.source}: fsdp"))
    axes = values.get("parallelism_config")
    if axes is not None:
        section = {name: value for name, value in axes.items() if not name.startswith("_")}
        reading.include(read_accelerate({"parallelism_config": section}, reading.source))
