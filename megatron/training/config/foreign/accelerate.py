"""--accelerate_config: the files of `accelerate config`, and Accelerate's plugins, as flags."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flags_by_spelling
from megatron.training.config.foreign.answers import (
    Reading,
    Values,
    answer_table,
    fields,
    load_answers,
    shown,
    switch,
    unknown,
    word,
)
from megatron.training.config.foreign.deepspeed import read_deepspeed, read_deepspeed_file
from megatron.training.config.foreign.files import load_json, load_yaml


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


PREFIXES = {
    "megatron_lm_config": "megatron_lm_",
    "deepspeed_config": "",
    "fsdp_config": "fsdp_",
    "parallelism_config": "parallelism_config_",
    "fp8_config": "fp8_",
}
"""Sections, and what may stand before each of their names."""

_TABLES = {
    section: answer_table(part, offloads=_offloads, json_of_plugin=_json_of_plugin)
    for section, part in load_answers("accelerate.toml").items()
}
SECTIONS = {section: _TABLES[section] for section in PREFIXES}

ACCELERATE = _TABLES["cluster"] | {
    f"{section}.{name}": answer for section, table in SECTIONS.items() for name, answer in table.items()
}
"""Every field, with its section."""

_SECTION_OF = {"MEGATRON_LM": "megatron_lm_config", "DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config"}
_PLUGINS = {"MegatronLMPlugin": "MEGATRON_LM", "DeepSpeedPlugin": "DEEPSPEED", "FullyShardedDataParallelPlugin": "FSDP"}
_PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU")
_STRATEGIES = {
    **dict.fromkeys(("FULL_SHARD", "1", "TRUE"), "optim_grads_params"),
    **dict.fromkeys(("SHARD_GRAD_OP", "2", "FALSE"), "optim_grads"),
    **dict.fromkeys(("NO_SHARD", "3"), "no_shard"),
}
_HYBRID = "give FULL_SHARD, and --num-distributed-optimizer-instances for the number of replicas of the shards"
_OF_DEEPSPEED = {
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
}
"""Fields of Accelerate that are keys of DeepSpeed's JSON."""


def read_accelerate_file(flag: str, path: str) -> Reading:
    """Returns what a YAML or JSON file says. Raises UserError, which names flag, file and line, if it cannot be
    read."""
    config = load_json(flag, path) if Path(path).suffix == ".json" else load_yaml(flag, path)
    return read_accelerate(config, f"{flag} {path}")


def read_plugin(plugin: object) -> Reading:
    """Returns what a MegatronLMPlugin, DeepSpeedPlugin or FullyShardedDataParallelPlugin of Accelerate says, or any
    dataclass of that name. Raises UserError for another object."""
    name = type(plugin).__name__
    if name not in _PLUGINS:
        raise UserError(f"{name}: expected one of {', '.join(_PLUGINS)}")
    values = {name: getattr(plugin, name) for name in getattr(plugin, "__dataclass_fields__", ())}
    return read_accelerate({"distributed_type": _PLUGINS[name], _SECTION_OF[_PLUGINS[name]]: values}, name)


def read_accelerate(config: Values, source: str) -> Reading:
    """Returns what a config says: settings, mistakes, and lines about fields without effect. `source` is the flag and
    the file, for messages."""
    reading = Reading(source)
    kind = str(config.get("distributed_type") or "").upper().removeprefix("DISTRIBUTEDTYPE.")
    if kind and kind not in (*_SECTION_OF, *_PLAIN):
        reading.refuse(f"distributed_type {kind}", f"choose from {', '.join((*_SECTION_OF, *_PLAIN))}")
    wanted = {section for of, section in _SECTION_OF.items() if of == kind or not kind}
    for name, value in config.items():
        if name not in SECTIONS:
            usable = reading.answer(name, value, ACCELERATE)
            if name == "num_processes" and usable not in (None, -1):
                reading.take(name, "planned_world_size", usable)
        elif not isinstance(value, Mapping):
            if value is not None:
                reading.refuse(f"{name} {shown(value)}", "expected fields and values")
        elif name in _SECTION_OF.values() and name not in wanted:
            if value:
                reading.note(name, f"has no effect beside distributed_type {kind}")
        else:
            _read_section(reading, name, fields(value))
    _precision(reading, config)
    return reading


def _read_section(reading: Reading, section: str, values: Values) -> None:
    prefix, table = PREFIXES[section], SECTIONS[section]
    given: dict[str, object] = {}
    for key, value in values.items():
        name = key if key in table else key.removeprefix(prefix)
        if name not in table:
            reading.refuse(f"{section}.{key}", unknown(name, table))
        elif name in given:
            reading.refuse(f"{section}.{key}", f"{name} is given twice, with and without the prefix {prefix}")
        elif not (section == "deepspeed_config" and str(value).lower() == "none"):
            usable = reading.answer(f"{section}.{name}", value, ACCELERATE)
            given |= {} if usable is None else {name: usable}
    if section == "megatron_lm_config":
        _megatron(reading, given)
    elif section == "deepspeed_config" and given:
        _deepspeed(reading, given)
    elif section == "fsdp_config" and given:
        _fsdp(reading, given)
    elif section == "parallelism_config":
        _parallelism(reading, given)


def _precision(reading: Reading, config: Values) -> None:
    name, fp8 = "mixed_precision", config.get("fp8_config")
    fp8 = fp8 if isinstance(fp8, Mapping) else {}
    precision = config.get(name)
    if precision is None:
        return
    precision = "no" if precision is False else str(precision).lower()  # YAML reads a bare no as false
    if precision not in ("no", "fp16", "bf16", "fp8"):
        reading.refuse(f"{name} {precision}", "choose from no, fp16, bf16, fp8")
        return
    reading.take(name, "fp16", precision == "fp16")
    reading.take(name, "bf16", precision in ("bf16", "fp8"))
    if precision == "fp8":
        form = str(fp8.get("fp8_format", fp8.get("format", "HYBRID"))).lower()
        if form not in ("hybrid", "e4m3"):
            reading.refuse(f"fp8_config.fp8_format {form}", "choose from HYBRID, E4M3")
        else:
            reading.take(name, "fp8", form)


def _megatron(reading: Reading, values: Values) -> None:
    section = "megatron_lm_config"
    backend = values.get("attention_backend")
    if isinstance(backend, str) and backend.lower() not in ("true", "false"):
        reading.take(f"{section}.attention_backend", "attention_backend", backend)
    if values.get("use_rotary_position_embeddings") is True:
        reading.take(f"{section}.use_rotary_position_embeddings", "position_embedding_type", "rope")
    if values.get("set_all_logging_options") is True:
        for field in ("log_params_norm", "log_num_zeros_in_grad", "log_throughput"):
            reading.take(f"{section}.set_all_logging_options", field, True)
    for key, value in (values.get("other_megatron_args") or {}).items():
        name = f"{section}.other_megatron_args.{key}"
        flag = flags_by_spelling().get(f"--{key.replace('_', '-')}")
        if flag is None:
            reading.refuse(name, "no such flag; --help all lists all")
        elif value is not None:
            wanted = value if flag.switch is None else flag.switch[f"--{key.replace('_', '-')}"] is bool(value)
            reading.take(name, flag.field, wanted)


def _deepspeed(reading: Reading, values: Values) -> None:
    """Reads the fields as the keys of the JSON that they are, or the JSON file that the section names."""
    section = "deepspeed_config"
    file = values.get("deepspeed_config_file") or values.get("hf_ds_config")
    config: dict = {}  # nested, as the JSON is
    for name, path in _OF_DEEPSPEED.items():
        if name in values:
            inner = config
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = values[name]
    found = [read_deepspeed(config, reading.source)] if config else []
    if isinstance(file, str):
        beside = [name for name in _OF_DEEPSPEED if name in values]
        for name in beside:
            reading.refuse(f"{section}.{name} {shown(values[name])}", f"{file} decides; set it there, and leave it out")
    if isinstance(file, Mapping):
        found = [read_deepspeed(file, f"{reading.source}: {section}.hf_ds_config")]
    elif file is not None:
        found = [read_deepspeed_file(f"{reading.source}: {section}.deepspeed_config_file", str(file))]
    names = {".".join(path): f"{section}.{name}" for name, path in _OF_DEEPSPEED.items()} if file is None else {}
    for one in found:
        reading.settings += [
            dataclasses.replace(setting, where=_renamed(setting.where, names)) for setting in one.settings
        ]
        reading.problems += [_renamed(problem, names) for problem in one.problems]
        reading.notes += [_renamed(note, names) for note in one.lines()]


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(f": {old}", f": {new}")
    return text


def _fsdp(reading: Reading, values: Values) -> None:
    section = "fsdp_config"
    name = next((one for one in ("reshard_after_forward", "sharding_strategy") if one in values), "sharding_strategy")
    strategy = str(values.get(name, "FULL_SHARD")).upper().removeprefix("SHARDINGSTRATEGY.")
    if strategy not in _STRATEGIES:
        works = _HYBRID if strategy.startswith("HYBRID") else "choose from FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"
        reading.refuse(f"{section}.{name} {strategy}", works)
        return
    name = f"{section}.{name}"
    if _STRATEGIES[strategy] != "no_shard":
        reading.take(name, "use_megatron_fsdp", True)
    reading.take(name, "data_parallel_sharding_strategy", _STRATEGIES[strategy])
    if any(values.get(one) is True for one in ("offload_params", "cpu_offload")):
        reading.take(f"{section}.offload_params", "optimizer_cpu_offload", True)
        reading.note(f"{section}.offload_params", "moves the optimizer's state; shards of weights stay on the device")
    if values.get("activation_checkpointing") is True:
        name = f"{section}.activation_checkpointing"
        reading.take(name, "recompute_granularity", "full")
        reading.take(name, "recompute_method", "uniform")
        reading.take(name, "recompute_num_layers", 1)


def _parallelism(reading: Reading, values: Values) -> None:
    section = "parallelism_config"
    sizes = {name: values.get(name, 1) for name in ("sp_size", "dp_replicate_size", "dp_shard_size")}
    if sizes["sp_size"] > 1:
        reading.take(f"{section}.sp_size", "context_parallel_size", sizes["sp_size"])
        reading.take(f"{section}.sp_size", "cp_comm_type", ["a2a"])
    if sizes["dp_replicate_size"] > 1 and sizes["dp_shard_size"] > 1:
        name = f"{section}.dp_replicate_size"
        reading.take(name, "num_distributed_optimizer_instances", sizes["dp_replicate_size"])
