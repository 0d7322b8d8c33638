"""--deepspeed_config: the JSON of DeepSpeed as flags."""

from collections.abc import Iterator
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.training.config.foreign.answers import AUTO, Reading, Values, answer_table, load_answers, shown
from megatron.training.config.foreign.deepspeed_optimizer import read_optimizer, read_scheduler
from megatron.training.config.foreign.files import load_json

DEEPSPEED = answer_table(load_answers("deepspeed.toml"))
"""Every key, with the sections that lead to it, joined by dots."""

_OLD_NAMES = {"bfloat16": "bf16"}
_MODEL_TYPES = {"fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
_STAGES = {2: "optim_grads", 3: "optim_grads_params"}


def read_deepspeed_file(flag: str, path: str) -> Reading:
    """Returns what a JSON file says. Raises UserError, which names flag, file and line, if it cannot be read."""
    return read_deepspeed(load_json(flag, path), f"{flag} {path}")


def read_deepspeed(config: Values, source: str) -> Reading:
    """Returns what a config says: settings, mistakes, and lines about keys without effect. `source` is the flag and the
    file, for messages."""
    reading = Reading(source)
    current = {_OLD_NAMES.get(key, key): value for key, value in config.items()}
    if isinstance(current.get("zero_optimization"), bool):  # as in the first releases
        current["zero_optimization"] = {"stage": int(current["zero_optimization"])}
    values = dict(_leaves(current))
    automatic = [name for name, value in values.items() if value == AUTO and isinstance(value, str)]
    reading.automatic += automatic
    given: dict[str, object] = {}
    for name, value in values.items():
        if name not in DEEPSPEED and any(_inside(name)):
            reading.refuse(f"{name} {shown(value)}", "expected an object with the keys of this section")
        else:
            usable = reading.answer(name, value, DEEPSPEED)
            given |= {} if usable is None else {name: usable}
    for read in (_batch, _precision, _stage, _offload, _parallel, _watching, read_optimizer, read_scheduler):
        try:
            read(reading, given)
        except UserError as error:
            reading.problems.append(f"{source}: {error}")
    return reading


def _inside(section: str) -> Iterator[str]:
    return (name for name in DEEPSPEED if name.startswith(f"{section}."))


def _leaves(values: Values, section: str = "") -> Iterator[tuple[str, object]]:
    """Yields the keys that are switched on, with their sections. A section whose `enabled` is not true, and one that is
    true or false as a whole, yields `enabled` alone, and its unknown keys."""
    for key, value in values.items():
        name = f"{section}{key}"
        if name in DEEPSPEED and isinstance(value, dict) and _is_off(value.get("enabled", True)):
            continue
        if name in DEEPSPEED or not any(_inside(name)):
            yield name, value
        elif isinstance(value, bool) and f"{name}.enabled" in DEEPSPEED:
            yield f"{name}.enabled", value
        elif not isinstance(value, dict):
            if value is not None:
                yield name, value
        elif f"{name}.enabled" in DEEPSPEED and _is_off(value.get("enabled", False)):
            yield from ((f"{name}.{one}", value[one]) for one in value if one == "enabled")
            yield from ((one, item) for one, item in _leaves(value, f"{name}.") if one not in DEEPSPEED)
        else:
            yield from _leaves(value, f"{name}.")


def _is_off(value: object) -> bool:
    return value in (False, AUTO) or (isinstance(value, str) and value.lower() == "false")


# ---------------------------------------------------------------------------------------------------------------------
# The sections


def _batch(reading: Reading, values: Values) -> None:
    """Batch sizes. Accumulation is 1 where neither the file nor the flags leave it open."""
    size = values.get("train_batch_size")
    if size is None:
        return
    reading.take("train_batch_size", "global_batch_size", size)
    if not values.keys() & {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}:
        reading.take("train_batch_size", "gradient_accumulation_steps", 1, stated=False, unless=("micro_batch_size",))


def _precision(reading: Reading, values: Values) -> None:
    """Loss scale, and the types in which gradients are accumulated and sent."""
    model = next((name for name in ("fp16", "bf16") if values.get(f"{name}.enabled") is True), None)
    if model == "fp16":
        if values.get("fp16.loss_scale"):
            reading.take("fp16.loss_scale", "loss_scale", values["fp16.loss_scale"])
        power = values.get("fp16.initial_scale_power")
        name = "fp16.initial_scale_power"
        if power is not None and not 0 <= power <= 127:
            raise UserError(f"{name} {power}: a scale is at most 2 ** 127; 16 is the default")
        reading.take(name, "initial_loss_scale", 2.0 ** (16 if power is None else power), power is not None)
        for key, field, default in (
            ("loss_scale_window", "loss_scale_window", 1000.0),
            ("hysteresis", "hysteresis", 2),
            ("min_loss_scale", "min_loss_scale", 1.0),
        ):
            reading.take(f"fp16.{key}", field, default, stated=False)
    _gradient_types(reading, values, model)


def _gradient_types(reading: Reading, values: Values, model: str | None) -> None:
    name = "communication_data_type"
    sent = values.get(name)
    if sent is not None and sent != "fp32":
        if _MODEL_TYPES.get(sent) is None or _MODEL_TYPES[sent] != model:
            raise UserError(f"{name} {shown(sent)}: gradients are sent in float32 or in the model's type, {model}")
        reading.take(name, "grad_reduce_in_bf16", True)
    name = "data_types.grad_accum_dtype"
    kept = values.get(name)
    if kept not in (None, "fp32"):
        if kept != "bf16" or model != "bf16":
            raise UserError(f"{name} {shown(kept)}: fp32 works, and bf16 in a model in bf16")
        reading.take(name, "use_precision_aware_optimizer", True)
        reading.take(name, "main_grads_dtype", "bf16")


def _stage(reading: Reading, values: Values) -> None:
    """The stage of ZeRO; 0 where the section does not say."""
    name = "zero_optimization.stage"
    if not any(key.startswith("zero_optimization.") for key in values):
        return
    stage = values.get(name, 0)
    if stage not in (0, 1, 2, 3):
        raise UserError(f"{name} {stage}: choose from 0, 1, 2, 3")
    reading.take(name, "use_distributed_optimizer", stage > 0)
    if stage in _STAGES:
        reading.take(name, "use_megatron_fsdp", True)
        reading.take(name, "data_parallel_sharding_strategy", _STAGES[stage])


def _offload(reading: Reading, values: Values) -> None:
    """State in host memory or in files, and weights in files."""
    section = "zero_optimization.offload_optimizer"
    device = _device(values, section, ("cpu", "nvme"))
    if device in ("cpu", "nvme"):
        reading.take(f"{section}.device", "optimizer_cpu_offload", True)
        if device == "nvme":
            reading.take(f"{section}.nvme_path", "optimizer_nvme_offload_path", _nvme_path(values, section))
        if values.get(f"{section}.pin_memory") is False:
            reading.take(f"{section}.pin_memory", "pin_cpu_params", False)
        ratio = values.get(f"{section}.ratio")
        if ratio is not None:
            reading.take(f"{section}.ratio", "optimizer_offload_fraction", ratio)
    section = "zero_optimization.offload_param"
    device = _device(values, section, ("cpu", "nvme"))
    if device == "cpu":
        reading.note(f"{section}.device cpu", "has no effect: shards of weights stay on the device, 2 bytes a weight")
    if device == "nvme":
        reading.take(f"{section}.nvme_path", "param_nvme_offload_path", _nvme_path(values, section))


def _nvme_path(values: Values, section: str) -> str:
    path = values.get(f"{section}.nvme_path")
    if not isinstance(path, str) or not path:
        raise UserError(f"{section}.device nvme: needs nvme_path, a folder on a local disk")
    return path


def _device(values: Values, section: str, choices: tuple[str, ...]) -> str | None:
    device: str | None = values.get(f"{section}.device")
    if device not in (None, "none", *choices):
        raise UserError(f"{section}.device {shown(device)}: choose from {', '.join(choices)}, none")
    return device


def _parallel(reading: Reading, values: Values) -> None:
    """Tensor, sequence and expert parallelism; recomputation in pipelines."""
    for name, field in (
        ("tensor_parallel.autotp_size", "tensor_model_parallel_size"),
        ("sequence_parallel_size", "context_parallel_size"),
    ):
        size = values.get(name)
        if size is not None:
            reading.take(name, field, max(1, size))
            if field == "context_parallel_size" and size != 1:
                reading.take(name, "cp_comm_type", ["a2a"])
    if values.get("expert_parallel.enabled") is True:
        name = "expert_parallel.autoep_size"
        reading.take(name, "expert_model_parallel_size", values.get(name, 1))
    name = "pipeline.activation_checkpoint_interval"
    layers = values.get(name)
    if layers:
        reading.take(name, "recompute_granularity", "full")
        reading.take(name, "recompute_method", "uniform")
        reading.take(name, "recompute_num_layers", layers)


def _watching(reading: Reading, values: Values) -> None:
    """Times, memory, and services that get the metrics."""
    for name in ("wall_clock_breakdown", "comms_logger.enabled"):
        if values.get(name):
            reading.take(name, "timing_log_level", 2)
    if values.get("memory_breakdown"):
        reading.take("memory_breakdown", "log_memory_interval", 1)
    if values.get("tensorboard.enabled") is True:
        reading.take("tensorboard.output_path", "tensorboard_dir", str(_folder(values, "tensorboard")))
    if values.get("csv_monitor.enabled") is True:
        path = _folder(values, "csv_monitor") / "metrics.jsonl"
        reading.take("csv_monitor.output_path", "metrics_path", str(path))
    if values.get("comet.enabled") is True:
        reading.take("comet.enabled", "log_to", ["comet"])
    if values.get("wandb.enabled") is True:
        project = values.get("wandb.project") or "deepspeed"
        reading.take("wandb.project", "wandb_project", project)
        if values.get("wandb.team") is not None:
            reading.take("wandb.team", "wandb_entity", values["wandb.team"])
        reading.take("wandb.group", "wandb_exp_name", values.get("wandb.group") or project, stated=False)


def _folder(values: Values, section: str) -> Path:
    return Path(values.get(f"{section}.output_path") or ".") / (values.get(f"{section}.job_name") or "DeepSpeedJobName")
