"""The fields of TrainingArguments of Transformers as flags."""

import math
from collections.abc import Mapping
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.training.config.foreign.accelerate import read_accelerate
from megatron.training.config.foreign.answers import (
    Reading,
    Values,
    answer_table,
    fields,
    load_answers,
    number,
    shown,
    words,
)
from megatron.training.config.foreign.deepspeed import read_deepspeed, read_deepspeed_file

_WITHOUT_WORDS = "true"


def _fsdp_words(value: object) -> list[str]:
    """Returns the words of `fsdp`; true has none of its own."""
    if isinstance(value, bool):
        return [_WITHOUT_WORDS] if value else []
    return words(value)


def _attributes(value: object) -> Values:
    return fields(value if isinstance(value, Mapping) else getattr(value, "__dict__", value))


TRAINING_ARGUMENTS = answer_table(
    load_answers("training_arguments.toml"), fsdp_words=_fsdp_words, attributes=_attributes
)
"""Every field."""

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
