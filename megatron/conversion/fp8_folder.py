"""Hugging Face folders whose linear weights are fp8 (e4m3) with scales: writing them, for vLLM, and reading them.

A weight w [out, in] is stored as q = w / scale, rounded, with float32 scales that make the largest value of their part
448: one scale per matrix (`tensor`), per row (`channel`), or per 128 by 128 elements (`block`). `tensor` and `channel`
have the format of the package compressed-tensors, `block` that of DeepSeek-V3 (DeepSeek-AI 2024, section 3.3.2).
Engines quantize the activations themselves, for each token. Embeddings, norms, routers and the output layer keep their
type.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron.conversion.hub_defaults import Json
from megatron.conversion.model_folder import CONFIG, INDEX, ModelFolder, index_of, new_folder, open_folder, refuse_used
from megatron.conversion.verification import check_finite
from megatron.core.dist_checkpointing.data_file import LazyTensor, TensorEntry, write_data_file
from megatron.core.dist_checkpointing.safetensors_file import TensorInFile, read_tensor
from megatron.core.exceptions import UserError
from megatron.core.ops.fp8.formats import BLOCK, cast, largest_finite

Granularity = Literal["tensor", "channel", "block"]
FP8 = torch.float8_e4m3fn
QUANTIZATION = "quantization_config"
ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"),
)
"""Classes whose linear layers are known to be quantized by these names in vLLM."""
_SUFFIX: dict[Granularity, str] = {"tensor": "weight_scale", "channel": "weight_scale", "block": "weight_scale_inv"}
_SUFFIXES = ("weight_scale", "weight_scale_inv")
_ROUTER = "gate"


def quantize(weight: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Returns a matrix [out, in] in fp8, and its float32 scales: [1], [out, 1] or [out / 128, in / 128], rounded up."""
    wide = weight.float()
    if granularity == "tensor":
        largest = wide.abs().amax().view(1)
    elif granularity == "channel":
        largest = wide.abs().amax(1, keepdim=True)
    else:
        rows, columns = (math.ceil(size / BLOCK) for size in wide.shape)
        padded = torch.zeros(rows * BLOCK, columns * BLOCK)
        padded[: wide.shape[0], : wide.shape[1]] = wide.abs()
        largest = padded.view(rows, BLOCK, columns, BLOCK).amax((1, 3))
    scale = torch.where(largest > 0, largest / largest_finite(FP8), 1.0)
    return cast(wide / _spread(scale, wide), FP8), scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Returns fp8 times its scales, in float32."""
    return weight.float() * _spread(scale.float(), weight)


def _spread(scale: Tensor, weight: Tensor) -> Tensor:
    """Returns the scale of each element, in a shape that multiplies the matrix."""
    if scale.numel() == 1 or tuple(scale.shape) == (weight.shape[0], 1):
        return scale.reshape(-1, 1)
    rows = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@dataclass(frozen=True)
class WrittenFp8:
    """A folder with fp8 weights."""

    num_quantized: int
    """Number of matrices in fp8."""
    nbytes: int
    """Size of all tensors."""


def is_quantized(name: str, place: TensorInFile) -> bool:
    """Whether a tensor of a model is the weight of a linear layer that is stored in fp8."""
    module = name.removesuffix(".weight")
    is_linear = name.endswith("_proj.weight") or ".experts." in name
    return is_linear and len(place.shape) == 2 and module.rpartition(".")[2] != _ROUTER


def check_architecture(architecture: str) -> None:
    """Raises UserError naming the known classes if the linear layers of this one are not known."""
    if architecture not in ARCHITECTURES:
        raise UserError(f"--fp8: {architecture} cannot be written in fp8; these can: {', '.join(ARCHITECTURES)}")


def write_fp8(source: Path, target: Path, granularity: Granularity) -> WrittenFp8:
    """Writes the model in the folder `source` as the folder `target` with fp8 weights, one tensor at a time. Other
    files are copied.

    Raises UserError for an unknown architecture, a model that is quantized already, a weight that is not finite, or if
    `target` is not empty. `target` is complete or does not exist.
    """
    refuse_used(target)
    folder = open_folder(source)
    check_architecture((folder.config.get("architectures") or ["a model without architectures"])[0])
    if QUANTIZATION in folder.config:
        raise UserError(f"{source / CONFIG}: the model is quantized already ({QUANTIZATION})")
    by_file: dict[str, list[str]] = {}
    for name, place in folder.tensors.items():
        by_file.setdefault(place.path.name, []).append(name)
    quantized = [name for name, place in folder.tensors.items() if is_quantized(name, place)]
    file_of: dict[str, str] = {}
    nbytes = 0
    with new_folder(target, "written") as (disk, aside):
        for file, names in by_file.items():
            entries = [entry for name in names for entry in _entries(name, folder.tensors[name], granularity)]
            entries.sort(key=lambda entry: -entry.flat.dtype.itemsize)
            write_data_file(disk, aside / file, entries)
            file_of |= {entry.key: file for entry in entries}
            nbytes += sum(entry.nbytes for entry in entries)
        if len(by_file) > 1:
            disk.write_file(aside / INDEX, index_of(file_of, nbytes))
        others = [name for name in folder.tensors if name.endswith(f".{_ROUTER}.weight")]
        config = folder.config | {QUANTIZATION: _description(granularity, others)}
        disk.write_file(aside / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")
        for path in source.iterdir():
            if path.name not in (*by_file, INDEX, CONFIG):
                (shutil.copytree if path.is_dir() else shutil.copyfile)(path, aside / path.name)
    return WrittenFp8(len(quantized), nbytes)


def _entries(name: str, place: TensorInFile, granularity: Granularity) -> list[TensorEntry]:
    """Returns what is written for a tensor: itself, or its elements in fp8 and its scales."""
    numel = math.prod(place.shape)
    if not is_quantized(name, place):
        return [TensorEntry(name, place.shape, LazyTensor(place.dtype, numel, lambda: read_tensor(place).flatten()))]
    out, columns = place.shape
    blocks = (math.ceil(out / BLOCK), math.ceil(columns / BLOCK))
    shape = {"tensor": (1,), "channel": (out, 1), "block": blocks}[granularity]
    parts = [partial(_part, name, place, granularity, index) for index in (0, 1)]
    scale = f"{name.removesuffix('weight')}{_SUFFIX[granularity]}"
    return [
        TensorEntry(name, place.shape, LazyTensor(FP8, numel, parts[0])),
        TensorEntry(scale, shape, LazyTensor(torch.float32, math.prod(shape), parts[1])),
    ]


def _part(name: str, place: TensorInFile, granularity: Granularity, index: int) -> Tensor:
    values = read_tensor(place)
    check_finite(values, f"{place.path}: {name}", place.dtype)
    return quantize(values, granularity)[index].flatten()


def _description(granularity: Granularity, routers: list[str]) -> Json:
    """Returns the value of `quantization_config`."""
    kept = ["lm_head", *(name.removesuffix(".weight") for name in routers)]
    if granularity == "block":
        block = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return block | {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": kept}
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": granularity, "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def with_scales(folder: ModelFolder) -> ModelFolder:
    """Returns the folder with fp8 weights joined with their scales, so that `read_weight` returns their product.

    A folder of another kind, or of another quantization, is returned as it is. Raises UserError for a weight in fp8
    without scales, or with scales of a wrong shape.
    """
    found = folder.config.get(QUANTIZATION)
    if not isinstance(found, dict) or not _is_known(found):
        return folder
    names = [name for name, place in folder.tensors.items() if place.dtype == FP8]
    scales: dict[str, TensorInFile] = {}
    for name in names:
        stem, place = name.removesuffix("weight"), folder.tensors[name]
        options = [
            f"{stem}{suffix}" for suffix in dict.fromkeys(_SUFFIX.values()) if f"{stem}{suffix}" in folder.tensors
        ]
        if not options:
            raise UserError(f"{place.path}: {name} is fp8, but has no {stem}weight_scale or {stem}weight_scale_inv")
        scales[name] = folder.tensors[options[0]]
        _check_shape(options[0], scales[name], place)
    taken = {f"{name.removesuffix('weight')}{suffix}" for name in names for suffix in _SUFFIXES}
    tensors = {name: place for name, place in folder.tensors.items() if name not in taken}
    config = {key: value for key, value in folder.config.items() if key != QUANTIZATION}
    return replace(folder, config=config, tensors=tensors, scales=scales)


def read_weight(folder: ModelFolder, name: str) -> Tensor:
    """Returns a tensor of a folder; an fp8 weight times its scales, in float32."""
    values = read_tensor(folder.tensors[name])
    return dequantize(values, read_tensor(folder.scales[name])) if name in folder.scales else values


def weight_dtype(folder: ModelFolder, name: str) -> torch.dtype:
    """Returns the type of a tensor of a folder; for an fp8 weight that of the model before it was quantized."""
    if name not in folder.scales:
        return folder.tensors[name].dtype
    found = getattr(torch, str(folder.config.get("dtype") or folder.config.get("torch_dtype") or ""), None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def _is_known(description: Mapping[str, Json]) -> bool:
    if description.get("quant_method") == "fp8":
        return description.get("weight_block_size") in (None, [BLOCK, BLOCK])
    return description.get("quant_method") == "compressed-tensors" and description.get("format") == "float-quantized"


def _check_shape(name: str, scale: TensorInFile, weight: TensorInFile) -> None:
    out, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
    blocks = (math.ceil(out / BLOCK), math.ceil(columns / BLOCK))
    if scale.shape not in ((), (1,), (out, 1), blocks):
        raise UserError(
            f"{scale.path}: {name} has shape {list(scale.shape)}; scales of a weight {list(weight.shape)} have shape "
            f"[1], [{out}, 1] or {list(blocks)}"
        )
