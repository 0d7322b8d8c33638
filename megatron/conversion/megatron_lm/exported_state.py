"""What an export to Megatron-LM holds beside tensors: the run's arguments, counts, schedule and optimizer settings."""

import argparse
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.conversion.spellings import Values, sized_layers
from megatron.core.dist_checkpointing.checkpoint import Checkpoint
from megatron.core.dist_checkpointing.chunk import is_weight
from megatron.core.transformer.config.heterogeneous import HETEROGENEOUS
from megatron.training.config.flag_table import flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import CHOSEN


def common_state(checkpoint: Checkpoint, config: PretrainConfig) -> dict[str, object]:
    """Returns arguments, counts and schedule; of a checkpoint without a run the arguments alone."""
    saved = checkpoint.manifest.common
    state = saved.get("train_state") or {}
    arguments = _arguments(config, state)
    if (half := half_flag(checkpoint)) is not None:
        setattr(arguments, half, True)
    common: dict[str, object] = {"args": arguments, "checkpoint_version": 3.0}
    if not state:
        return common
    common["iteration"] = checkpoint.manifest.iteration
    common["num_floating_point_operations_so_far"] = state.get("floating_point_operations_so_far", 0.0)
    common["opt_param_scheduler"] = dict(saved["scheduler"])
    return common


def half_flag(checkpoint: Checkpoint) -> str | None:
    """Returns the name of the flag for the type of the weights; None if that has 32 bits or more."""
    types = {parts[0].chunk.dtype for name, parts in checkpoint.catalogue.items() if is_weight(name)}
    return next((name for dtype, name in _HALF.items() if dtype in types), None)


_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def update_count(checkpoint: Checkpoint) -> float:
    """Returns the number of updates that the optimizer has made."""
    return float(checkpoint.manifest.common["optimizer"].get("update_count", 0))


def parameter_group(checkpoint: Checkpoint, config: PretrainConfig, decays: bool) -> dict[str, object]:
    """Returns the settings of Adam for the parameters with weight decay, or for those without."""
    flags = config.optimizer
    group: dict[str, object] = {
        "is_expert_parallel": False,
        "default_config": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
    }
    group |= {"max_lr": flags.lr, "min_lr": flags.min_lr, "lr": flags.lr, "eps": flags.adam_eps}
    group |= {"betas": (flags.adam_beta1, flags.adam_beta2), "weight_decay": flags.weight_decay}
    group |= {"step": update_count(checkpoint), "decoupled_weight_decay": True}
    return group | {"wd_mult": 1.0 if decays else 0.0}


def loss_scale(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the state of the loss scale; empty if there is none."""
    scaler = checkpoint.manifest.common["optimizer"].get("grad_scaler") or {}
    return {
        key: torch.tensor([value], dtype=torch.float32 if key == "scale" else torch.int32)
        for key, value in scaler.items()
    }


def _arguments(config: PretrainConfig, state: Mapping[str, object]) -> argparse.Namespace:
    """Returns the flags that were given as Megatron-LM's namespace has them, and the counts of the run."""
    values: dict[str, object] = {}
    flat = config.flat()
    for field, flag in flag_table().items():
        turned_off = flag.switch is not None and not flag.switch[flag.spelling]
        name = field if turned_off else flag.spelling[2:].replace("-", "_")
        value = flat.get(field)
        if config.provenance.get(field) in CHOSEN and _is_plain(value):
            values[name] = value
    if flat[HETEROGENEOUS[0]] is not None:
        values[HETEROGENEOUS[0]] = _description(flat)
    if values.get("rope_scaling_type") == "llama3":
        del values["rope_scaling_type"]
        values["use_rope_scaling"] = True
    for count in ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"):
        values[count] = state.get(count, 0)
    return argparse.Namespace(**values)


def _description(values: Values) -> str:
    """Returns the descriptions of layers with all sizes, as Megatron-LM reads them (as run in 0.19.2): it ignores
    `intermediate_size`, and needs the keys of a part's size even where the part is left out."""
    blocks = [
        {
            "attention": _part(layer.attention) | {"num_query_groups": layer.num_query_groups},
            "ffn": _part(layer.mlp) | {"ffn_hidden_size": layer.ffn_hidden_size},
        }
        for layer in sized_layers(values) or ()
    ]
    return json.dumps({"block_configs": blocks}, separators=(",", ":"))


def _part(kind: str | None) -> dict[str, object]:
    return {"no_op": kind is None, "replace_with_linear": kind == "linear"}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
