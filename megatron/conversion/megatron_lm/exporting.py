"""Export to Megatron-LM: a checkpoint becomes a folder in its torch_dist format, from which Megatron-LM continues.

The folder is what torch.distributed.checkpoint reads: one data file of archives of torch.save, one for each layer of
each tensor, and `.metadata`. Optimizer state has the format of --dist-ckpt-optim-fully-reshardable. One tensor is in
memory at a time.
"""

import argparse
import json
import math
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.arguments import check_layers
from megatron.conversion.megatron_lm.mixer_rows import RowOrder, row_orders
from megatron.conversion.megatron_lm.names import ExportedNames, exported_shape
from megatron.conversion.spellings import changes_nothing
from megatron.core.dist_checkpointing.checkpoint import Checkpoint
from megatron.core.dist_checkpointing.checkpoint_selection import Log, open_newest
from megatron.core.dist_checkpointing.chunk import (
    AVERAGE,
    MASTER,
    Chunk,
    is_optimizer_state,
    is_weight,
    optimizer_state_name,
)
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.folders import RELEASE, Step, folder_name, sibling_name, write_tracker
from megatron.core.dist_checkpointing.planning import describe_names, match
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
from megatron.core.utils.torch_private import DistFolderWriter
from megatron.training.config.flag_table import flag_table, spelling_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.recorded_flags import words_of_spec
from megatron.training.config.settings import CHOSEN
from megatron.training.inspection.run_description import MODEL_OPTIONS, architecture_of
from megatron.training.trained_model import config_for_one_process

_DATA = "__0_0.distcp"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ExportedRun:
    """Result of an export."""

    folder: Path
    nbytes: int
    with_optimizer: bool


def export_run(
    root: Path,
    target: Path,
    *,
    step: Step | None = None,
    spec: Sequence[str] | None = None,
    is_local: bool = False,
    tokenizer: Path | None = None,
    log: Log = print,
) -> ExportedRun:
    """Writes a checkpoint under `root` (the newest whole one, or that of `step`) into the folder `target`, in
    Megatron-LM's torch_dist format, with its tracker file.

    The rows of the vocabulary are padded with zeros as --make-vocab-size-divisible-by says. Only Adam's optimizer state
    is exported; a line says so if there is another. `spec` are module and name of the layers of a model with --spec.
    `tokenizer` is the --tokenizer-model of the result in place of the run's.
    Norms have the names of Transformer Engine's layers, with `is_local` those of Megatron-LM's own layers.
    Raises UserError if `target` is not empty, for layers whose names in Megatron-LM are not known, and for model
    options that Megatron-LM lacks.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not empty; name a folder that is empty or does not exist")
    checkpoint = open_newest(root, step, log)
    config = config_for_one_process(checkpoint.manifest.config, words_of_spec(spec), has_cuda=False)
    _check_model(config)
    if config.optimizer.optimizer not in ("adam", "sgd"):
        log(f"the moments of --optimizer {config.optimizer.optimizer} are left behind: its format there is not known")
    found: Step = checkpoint.manifest.iteration if "train_state" in checkpoint.manifest.common else RELEASE
    disk, aside = Disk(), sibling_name(target, "tmp")
    try:
        folder = aside / folder_name(found)
        disk.make_directory(folder)
        if tokenizer is not None:
            config = replace(config, tokenizer=replace(config.tokenizer, tokenizer_model=str(tokenizer.absolute())))
        nbytes, with_optimizer = _write(checkpoint, config, folder, is_local, log)
        write_tracker(disk, aside, found)
        disk.sync_directory(aside)
        disk.rename(aside, target)
        disk.sync_directory(target.parent)
    except OSError as error:
        raise UserError(f"{error.filename or target}: {error.strerror or error}; nothing is exported") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return ExportedRun(target / folder_name(found), nbytes, with_optimizer)


def _check_model(config: PretrainConfig) -> None:
    if config.flat()["model_family"] not in (None, "gpt"):
        raise UserError("only GPT models can be exported to Megatron-LM so far")
    check_layers(config, "export-megatron")
    own = ", ".join(spelling_of(name) for name in _own_options(config))
    if own:
        raise UserError(f"the model has {own}, without which Megatron-LM computes another function")


_THEIR_OPTIONS = frozenset(
    ("moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_apply_probs_on_input")
)
"""Those of `MODEL_OPTIONS` that Megatron-LM has too."""
_OWN_SWITCHES = ("relu", "geglu", "exact_geglu")
"""Activations that Megatron-LM has no flag for."""
_BY_WIDTH = ("softmax_scale", "embedding_multiplier", "logit_scale")
"""What --use-mup sets, which Megatron-LM has."""


def _own_options(config: PretrainConfig) -> list[str]:
    """Returns the fields that Megatron-LM has no flag for, where they change what the model computes."""
    values, turned = config.flat(), architecture_of(config)
    own = [name for name in MODEL_OPTIONS if name in turned and name not in _THEIR_OPTIONS]
    own += [name for name in _OWN_SWITCHES if values[name]]
    own += ["softmax_scale"] if values["softmax_scale"] is not None else []
    own = [name for name in own if not (values["use_mup"] and name in _BY_WIDTH)]
    own = [name for name in own if name != "rope_scaling_type" or values[name] != "llama3"]  # --use-rope-scaling there
    return [name for name in own if not changes_nothing(name, values)]


def _write(checkpoint: Checkpoint, config: PretrainConfig, folder: Path, is_local: bool, log: Log) -> tuple[int, bool]:
    """Writes all files of the folder; returns the bytes of the tensors, and whether there is optimizer state."""
    weights = [name for name in checkpoint.catalogue if is_weight(name)]
    names = ExportedNames(weights, config.flat()["hybrid_layer_pattern"] is not None, is_local)
    shapes = {name: checkpoint.catalogue[name][0].chunk.global_shape for name in weights}
    orders = row_orders(shapes)
    with_optimizer = _has_adam(checkpoint, weights, log)
    divisor = config.flat()["make_vocab_size_divisible_by"]
    plan = [item for kind in ("", MASTER, *_MOMENTS) if with_optimizer or not kind for item in _plan(checkpoint, kind)]
    writer, nbytes = DistFolderWriter(_DATA), 0
    with open(folder / _DATA, "wb") as file:
        for prefix, source, weight, dtype in plan:
            whole = exported_shape(weight, shapes[weight], divisor)
            values = _read(checkpoint, source, shapes[weight], dtype, whole)
            nbytes += values.nbytes
            for name, shape, part in _parts_of(weight, whole, values, orders.get(weight)):
                location = names.location(name)
                lead = () if location.layer is None else (names.num_layers,)
                offset = () if location.layer is None else (location.layer,)
                start = (*offset, *(0 for _ in shape))
                part = part.view((*(1 for _ in lead), *shape))
                writer.add_tensor(file, prefix + location.name, (*lead, *shape), start, part)
        for name in _extra_states(names, shapes):
            writer.add_object(file, name, [None])
    (folder / ".metadata").write_bytes(pickle.dumps(writer.metadata()))
    torch.save(_common(checkpoint, config, with_optimizer), folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(
        json.dumps(backend | {"common_backend": "torch", "common_backend_version": 1})
    )
    return nbytes, with_optimizer


def _has_adam(checkpoint: Checkpoint, weights: Sequence[str], log: Log) -> bool:
    """Whether the checkpoint holds the state of Adam, and of no other optimizer."""
    ours = {optimizer_state_name(kind, name) for kind in (MASTER, *_MOMENTS, AVERAGE) for name in weights}
    if any(optimizer_state_name(AVERAGE, name) in checkpoint.catalogue for name in weights):
        log("left behind: the moving average of the weights (--ema-decay), for which its format has no place")
    other = [name for name in checkpoint.catalogue if is_optimizer_state(name) and name not in ours]
    if other:
        log(
            f"left behind, all optimizer state: only Adam's can be exported, and there is {describe_names(other, 3)}; "
            "start Megatron-LM with --no-load-optim"
        )
        return False
    return any(optimizer_state_name(_MOMENTS[0], name) in checkpoint.catalogue for name in weights)


def _plan(checkpoint: Checkpoint, kind: str) -> Iterator[tuple[str, str, str, torch.dtype]]:
    """Yields for each tensor of a kind: the prefix of its name there, what it is read from, its weight, its type."""
    for weight in [name for name in checkpoint.catalogue if is_weight(name)]:
        own = optimizer_state_name(kind, weight) if kind else weight
        if kind == MASTER and optimizer_state_name(_MOMENTS[0], weight) in checkpoint.catalogue:
            yield "optimizer.state.param.", own if own in checkpoint.catalogue else weight, weight, torch.float32
        elif kind != MASTER and own in checkpoint.catalogue:
            prefix = f"optimizer.state.{kind}." if kind else ""
            yield prefix, own, weight, checkpoint.catalogue[own][0].chunk.dtype


def _read(checkpoint: Checkpoint, name: str, shape: Sequence[int], dtype: torch.dtype, theirs: Sequence[int]) -> Tensor:
    """Returns a tensor, one-dimensional, with zeros for the rows that pad a vocabulary."""
    values = torch.zeros(math.prod(theirs), dtype=dtype)
    chunk = Chunk(name, tuple(shape), Box.whole(tuple(shape)), None, values[: math.prod(shape)])
    fill_tensors(checkpoint, match([chunk], {name: checkpoint.catalogue[name]}))
    return values


def _parts_of(
    weight: str, shape: tuple[int, ...], values: Tensor, order: RowOrder | None
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Yields name, shape and elements of a tensor, or of each of its parts if its rows have another order there."""
    if order is None:
        yield weight, shape, values
        return
    for (name, own), part in zip(order.part_shapes(weight).items(), order.split(values), strict=True):
        is_convolution = weight.endswith("conv1d.weight")  # [channels, 1, taps], as torch has it
        yield name, (own[0], 1, own[1]) if is_convolution else own, part


_LINEAR = re.compile(r"(?:.*\.)?(?:linear_\w+|in_proj|out_proj|eh_proj|output_layer)")
"""Modules that have an extra state in Transformer Engine."""


def _extra_states(names: ExportedNames, shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yields the names of the entries for extra states of linear layers."""
    for weight, shape in shapes.items():
        module = weight.removesuffix(".weight")
        if not weight.endswith(".weight") or not _LINEAR.fullmatch(module):
            continue
        location, layers = names.location(weight), names.num_layers
        experts = shape[0] if ".experts.linear_" in weight else 1
        stem = location.name.removesuffix(".weight")
        for expert in range(experts):
            index = [*([location.layer] if location.layer is not None else []), *([expert] if experts > 1 else [])]
            sizes = [*([layers] if location.layer is not None else []), *([experts] if experts > 1 else [])]
            yield f"{stem}._extra_state/shard_{'.'.join(map(str, index or [0]))}_{'.'.join(map(str, sizes or [1]))}"


def _common(checkpoint: Checkpoint, config: PretrainConfig, with_optimizer: bool) -> dict[str, object]:
    saved = checkpoint.manifest.common
    state = saved.get("train_state") or {}
    common: dict[str, Any] = {"args": _arguments(config, state), "checkpoint_version": 3.0}
    if not state:
        return common
    common["iteration"] = checkpoint.manifest.iteration
    common["num_floating_point_operations_so_far"] = state.get("floating_point_operations_so_far", 0.0)
    common["opt_param_scheduler"] = dict(saved["scheduler"])
    if with_optimizer:
        common["optimizer"] = _optimizer(saved["optimizer"], saved["scheduler"], config)
        common["content_metadata"] = {"distrib_optim_sharding_type": "fully_reshardable"}
    return common


def _optimizer(state: Mapping[str, Any], schedule: Mapping[str, object], config: PretrainConfig) -> dict[str, object]:
    flags = config.optimizer
    group: dict[str, Any] = {
        "is_expert_parallel": False,
        "default_config": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
    }
    group |= {"max_lr": flags.lr, "min_lr": flags.min_lr, "lr": flags.lr, "eps": flags.adam_eps}
    group |= {"betas": (flags.adam_beta1, flags.adam_beta2), "weight_decay": flags.weight_decay}
    group |= {"step": float(state.get("update_count", 0)), "decoupled_weight_decay": True}
    inner: dict[str, object] = {"param_groups": [group | {"wd_mult": 1.0}, group | {"wd_mult": 0.0}]}
    made: dict[str, Any] = {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
    if state.get("grad_scaler"):
        made["grad_scaler"] = {
            key: torch.tensor([value], dtype=torch.float32 if key == "scale" else torch.int32)
            for key, value in state["grad_scaler"].items()
        }
    return made


def _arguments(config: PretrainConfig, state: Mapping[str, object]) -> argparse.Namespace:
    """Returns the flags that were given as Megatron-LM's namespace has them, and the counts of the run."""
    values: dict[str, Any] = {}
    flat = config.flat()
    for field, flag in flag_table().items():
        turned_off = flag.switch is not None and not flag.switch[flag.spelling]
        name = field if turned_off else flag.spelling[2:].replace("-", "_")
        value = flat.get(field)
        if config.provenance.get(field) in CHOSEN and _is_plain(value):
            values[name] = value
    if values.get("rope_scaling_type") == "llama3":
        del values["rope_scaling_type"]
        values["use_rope_scaling"] = True
    for count in ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"):
        values[count] = state.get(count, 0)
    return argparse.Namespace(**values)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
