"""Writes folders in Megatron-LM's formats torch_dcp and fsdp_dtensor (`plain_folder`): state dicts of whole modules,
layer by layer and expert by expert, as torch.distributed.checkpoint stores them.

torch_dcp numbers optimizer state: parameters with weight decay in the order of the module, then the others.
fsdp_dtensor names it like the weights, and its weights are the main weights.
"""

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.dist_exporting import DATA, is_linear
from megatron.conversion.megatron_lm.exported_state import (
    common_state,
    half_flag,
    loss_scale,
    parameter_group,
    update_count,
)
from megatron.conversion.megatron_lm.exported_tensors import MOMENTS, ExportedTensors
from megatron.conversion.megatron_lm.legacy_layout import EXPERTS
from megatron.core.dist_checkpointing.checkpoint_selection import Log
from megatron.core.dist_checkpointing.chunk import MASTER
from megatron.core.utils.torch_private import DistFolderWriter

PlainFormat = Literal["torch_dcp", "fsdp_dtensor"]

_ORDER = (
    *("embedding", "word_embeddings", "position_embeddings", "decoder", "mtp", "enorm", "hnorm", "eh_proj"),
    *("mtp_model_layer", "layers", "final_layernorm", "final_norm", "output_layer"),
    *("input_layernorm", "mixer", "self_attention", "pre_mlp_layernorm", "mlp"),
    *("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    *("conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D"),
    *("core_attention", "softmax_offset", "indexer", "linear_wq_b", "linear_wk", "k_norm", "linear_weights_proj"),
    *("linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm"),
    *("in_proj", "conv1d", "norm", "out_norm", "out_proj"),
    *("router", "fc1_latent_proj", "fc2_latent_proj", "gate_weight", "linear_fc1", "linear_fc2"),
    *("experts", "local_experts", "shared_experts"),
)
"""Words of names, those within one module in its order. A test holds the order of Megatron-LM 0.19.2."""
_PLACES = {word: place for place, word in enumerate(_ORDER)}
_SETTINGS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "bias_correction": True,
}
"""Settings of torch's Adam and of that of Transformer Engine, as they are there by default."""


@dataclass(frozen=True)
class _Entry:
    """A tensor of the module: a weight of ours, or one expert's part of it."""

    name: str
    weight: str
    expert: int | None


class _PlainFolder:
    """A folder that is being written."""

    def __init__(self, tensors: ExportedTensors, kind: PlainFormat, file: BinaryIO) -> None:
        self.tensors, self.kind, self.file = tensors, kind, file
        self.writer, self.nbytes = DistFolderWriter(DATA), 0
        flat = tensors.config.flat()
        self.is_half = half_flag(tensors.checkpoint) is not None
        self.is_grouped = bool(flat["moe_grouped_gemm"])
        self.is_gated = bool(flat["swiglu"] or flat["geglu"] or flat["quick_geglu"])

    @cached_property
    def entries(self) -> list[_Entry]:
        """The tensors of the module, in the order of the checkpoint."""
        return [entry for weight in self.tensors.weights for entry in self._entries_of(weight)]

    def _entries_of(self, weight: str) -> Iterator[_Entry]:
        name = self.tensors.names.in_module(weight)
        if EXPERTS not in weight:
            yield _Entry(name, weight, None)
            return
        head, tail = name.split(EXPERTS)
        for number in range(self.tensors.shapes[weight][0]):
            grouped = f"{head}{EXPERTS}{tail}{number}"
            own = grouped if self.is_grouped else f"{head}.experts.local_experts.{number}.linear_{tail}"
            yield _Entry(own, weight, number)

    def add_state(self, kind: str, prefix: str, suffix: str = "") -> None:
        """Adds weights ("") or a kind of optimizer state by the names of the module."""
        for weight, source, dtype in self.tensors.stored(kind):
            values = self._as_in_module(weight, self.tensors.read(weight, source, dtype))
            for entry in self._entries_of(weight):
                part = values if entry.expert is None else values[entry.expert]
                for name, half in self._halves(entry.name, part):
                    self.add_tensor(f"{prefix}{name}{suffix}", half)

    def add_numbered(self, prefix: str, parameters: Sequence[Sequence[_Entry]]) -> None:
        """Adds Adam's state by number, and the main weights of a run of fewer bits."""
        numbers = {entry: number for number, entry in enumerate(entry for group in parameters for entry in group)}
        places = {entry: (at, number) for at, group in enumerate(parameters) for number, entry in enumerate(group)}
        inner = "optimizer." if self.is_half else ""
        for kind in (*MOMENTS, *([MASTER] if self.is_half else [])):
            for weight, source, dtype in self.tensors.stored(kind):
                values = self._as_in_module(weight, self.tensors.read(weight, source, dtype))
                for entry in self._entries_of(weight):
                    if entry in numbers:
                        at, number = places[entry]
                        name = f"{inner}state.{numbers[entry]}.{kind}"
                        name = f"fp32_from_fp16_params.{at}.{number}" if kind == MASTER else name
                        self.add_tensor(prefix + name, values if entry.expert is None else values[entry.expert])
        for number in numbers.values():
            step = torch.tensor(update_count(self.tensors.checkpoint))
            self.add_tensor(f"{prefix}{inner}state.{number}.step", step)
        for at, group in enumerate(parameters):
            settings = _SETTINGS | parameter_group(self.tensors.checkpoint, self.tensors.config, decays=at == 0)
            settings["params"] = [numbers[entry] for entry in group]
            self.add_objects(f"{prefix}{inner}param_groups.{at}.", settings)
        for name, value in loss_scale(self.tensors.checkpoint).items():
            self.add_tensor(f"{prefix}grad_scaler.{name}", value)

    def add_named(self) -> None:
        """Adds Adam's state by the names of the module."""
        outer = "module.module.module." if self.is_half else "module.module."
        for kind in MOMENTS:
            self.add_state(kind, f"optimizer.state.{outer}", f".{kind}")
        groups = [
            _SETTINGS | parameter_group(self.tensors.checkpoint, self.tensors.config, decays)
            for decays in (False, True)
        ]
        for entry in self.entries:
            if is_trained(entry.weight):
                for name in self._half_names(entry.name):
                    step = torch.tensor(update_count(self.tensors.checkpoint))
                    self.add_tensor(f"optimizer.state.{outer}{name}.step", step)
                prefix = f"optimizer.param_to_group_meta.{outer}{entry.name}."
                self.add_objects(prefix, groups[self.decays(entry)])

    def add_objects(self, prefix: str, values: Mapping[str, object]) -> None:
        """Adds the values of a dict, and those of the dicts in it, by their keys."""
        for key, value in values.items():
            if isinstance(value, dict):
                self.add_objects(f"{prefix}{key}.", value)
            else:
                self.writer.add_object(self.file, prefix + key, value)

    def add_tensor(self, name: str, values: Tensor) -> None:
        """Adds a whole tensor."""
        self.nbytes += values.nbytes
        self.writer.add_tensor(self.file, name, values.shape, (0,) * values.dim(), values.clone())

    def decays(self, entry: _Entry) -> bool:
        """Whether weight decay applies: it does to matrices, not to biases and vectors."""
        return len(self.tensors.shapes[entry.weight]) > 1 and not entry.weight.endswith(".bias")

    def _as_in_module(self, weight: str, values: Tensor) -> Tensor:
        order, shape = self.tensors.orders.get(weight), self.tensors.shape_of(weight)
        if order is None:
            return values.view(shape)
        rows = sum(own[0] for own in order.part_shapes("").values())
        inner = (1, -1) if weight.endswith("conv1d.weight") else (-1,) if len(shape) > 1 else ()
        return order.to_module(values).view(rows, *inner)

    def _halves(self, name: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        names = self._half_names(name)
        return zip(names, values.chunk(2) if len(names) > 1 else [values], strict=True)

    def _half_names(self, name: str) -> list[str]:
        """Returns the names of gate and up of an MLP, which fsdp_dtensor stores apart, or the one name."""
        is_gated = self.kind == "fsdp_dtensor" and self.is_gated
        if is_gated and re.search(r"\blinear_fc1\.(?:weight|bias)\d*$", name):
            return [f"{name}_w", f"{name}_v"]
        return [name]


def write_plain_folder(
    tensors: ExportedTensors, kind: PlainFormat, folder: Path, with_optimizer: bool, log: Log
) -> tuple[int, bool]:
    """Writes all files of the folder; returns the bytes of the tensors, and whether there is optimizer state. A line
    says so if the order of the parameters in Megatron-LM, which torch_dcp needs, is not known."""
    order: list[str] = []  # of the weights in the module, by which readers number parameters
    with open(folder / DATA, "wb") as file:
        made = _PlainFolder(tensors, kind, file)
        made.add_objects("", common_state(tensors.checkpoint, tensors.config))
        if kind == "fsdp_dtensor":
            made.add_state(MASTER, "model.module.")
            if with_optimizer:
                made.add_named()
        else:
            made.add_state("", "model.")
            for name in dict.fromkeys(
                entry.name.rpartition(".")[0] for entry in made.entries if is_linear(entry.weight)
            ):
                made.writer.add_object(file, f"model.{name}._extra_state", None)
            groups = _numbered(made) if with_optimizer else None
            if groups is not None:
                made.add_numbered("optimizer.", groups)
                order = [f"model.{entry.name}" for entry in sorted(made.entries, key=_known_place)]
            elif with_optimizer:
                log(
                    "left behind, all optimizer state: torch_dcp numbers it, and the order of this model's parameters "
                    "in Megatron-LM is not known; start it with --no-load-optim, or export as fsdp_dtensor"
                )
            with_optimizer = groups is not None
        (folder / ".metadata").write_bytes(pickle.dumps(made.writer.metadata(order)))
    return made.nbytes, with_optimizer


def _numbered(made: _PlainFolder) -> list[list[_Entry]] | None:
    """Returns the parameters with and without weight decay in the order of the module; None if that is not known."""
    if any(place_in_module(entry.name) is None for entry in made.entries):
        return None
    ordered = [entry for entry in sorted(made.entries, key=_known_place) if is_trained(entry.weight)]
    return [[entry for entry in ordered if made.decays(entry) is decays] for decays in (True, False)]


def _known_place(entry: _Entry) -> tuple[int, ...]:
    return place_in_module(entry.name) or ()


def place_in_module(name: str) -> tuple[int, ...] | None:
    """Returns a key that sorts the names of a module's parameters into the order in which Megatron-LM's module has
    them; None for a name whose place is not known. Layers and experts are ordered by number."""
    words = re.sub(r"\.(weight|bias)(\d+)$", r".\1.\2", name).split(".")
    places = [int(word) if word.isdigit() else _PLACES.get(word, -1) for word in words]
    return None if -1 in places else tuple(places)


def is_trained(weight: str) -> bool:
    """Whether the optimizer updates a weight. In Megatron-LM a router's biases that balance experts are no
    parameters."""
    return not weight.endswith("expert_bias")
