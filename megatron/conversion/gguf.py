"""Writes a Hugging Face folder as one GGUF file, which llama.cpp and programs built on it load.

The package `gguf` (extra `gguf`) lays out the file and quantizes. Norms, biases, routers and learned positions stay
float32, as llama.cpp expects them.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import numpy as np

from megatron.conversion.families import family_of
from megatron.conversion.gguf_models import GgufTensor, architecture_of, settings_of, tensors_of
from megatron.conversion.gguf_tokenizer import GgufTokenizer, read_tokenizer
from megatron.conversion.model_folder import CONFIG, open_folder
from megatron.conversion.verification import check_finite
from megatron.core.dist_checkpointing.folders import sibling_name
from megatron.core.exceptions import UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter

GgufType = Literal["f32", "f16", "bf16", "q8_0"]
_FLOAT32 = ("ffn_gate_inp.weight", "position_embd.weight", "rope_freqs.weight")


@dataclass(frozen=True)
class Written:
    """A GGUF file that was written."""

    architecture: str
    """llama.cpp's name."""
    num_tensors: int
    nbytes: int
    """Size of the file."""


def import_gguf() -> ModuleType:
    """Returns the package. Raises UserError if it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(f"--to-gguf needs the package gguf ({error}): pip install gguf") from error


def check_target(target: Path) -> None:
    """Raises UserError if a file cannot be written there without loss, or the package is missing."""
    import_gguf()
    if target.exists():
        raise UserError(f"--to-gguf {target} exists; name a file that does not exist")
    if not target.absolute().parent.is_dir():
        raise UserError(f"--to-gguf {target}: there is no folder {target.parent}")


def write_gguf(
    source: Path, target: Path, kind: GgufType = "f16", log: Callable[[str], object] = print, name: str | None = None
) -> Written:
    """Writes the model in the folder `source`, one tensor at a time, with matrices of the type `kind`.

    A matrix whose rows are no multiple of 32 elements stays float16 under q8_0; a line says how many do. `name` is
    the model's name for people. Raises UserError, before anything is written, if llama.cpp has no such architecture,
    setting or tokenizer, and for a weight that is not finite in its type. `target` is complete or does not exist.
    """
    gguf = import_gguf()
    check_target(target)
    folder = open_folder(source)
    family = family_of(folder.config["architectures"][0])
    config = family.complete_config(folder.config, str(source / CONFIG))
    architecture = architecture_of(config, str(source / CONFIG))
    numbers = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    layers = config["n_layer" if architecture.name == "gpt2" else "num_hidden_layers"]
    names = gguf.get_tensor_name_map(numbers[architecture.name], layers)
    tensors = tensors_of(architecture, config, folder, names.get_name)
    types = {tensor.name: _type_of(gguf, tensor, kind) for tensor in tensors}
    if kind == "q8_0" and (kept := [name for name, found in types.items() if found == gguf.GGMLQuantizationType.F16]):
        log(f"{len(kept)} matrices stay f16, since their rows are no multiple of 32 elements: {kept[0]}, ...")
    aside = sibling_name(target, "tmp")
    writer = gguf.GGUFWriter(aside, architecture.name)
    writer.add_name(name or target.stem)
    writer.add_file_type(gguf.LlamaFileType[("ALL_" if kind == "f32" else "MOSTLY_") + kind.upper()])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_uint32(f"{architecture.name}.vocab_size", config["vocab_size"])
    for key, value in settings_of(config, log):
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture.name}.{key}", value)
    _add_tokenizer(writer, read_tokenizer(source, config["vocab_size"], log))
    try:
        _write_tensors(gguf, writer, tensors, types)
        aside.rename(target)
    except OSError as error:
        raise UserError(f"--to-gguf {target}: {error.strerror or error}; nothing is written") from error
    finally:
        writer.close()
        aside.unlink(missing_ok=True)
    return Written(architecture.name, len(tensors), target.stat().st_size)


def _type_of(gguf: ModuleType, tensor: GgufTensor, kind: GgufType) -> int:
    """Returns the type of a tensor in the file, a GGMLQuantizationType."""
    types = gguf.GGMLQuantizationType
    if len(tensor.shape) == 1 or tensor.name.endswith(_FLOAT32):
        return int(types.F32)
    if kind == "q8_0" and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[types.Q8_0][0]:
        return int(types.F16)
    return int(types[kind.upper()])


def _add_tokenizer(writer: "GGUFWriter", tokenizer: GgufTokenizer) -> None:
    writer.add_tokenizer_model(tokenizer.model)
    if tokenizer.pre is not None:
        writer.add_tokenizer_pre(tokenizer.pre)
    if tokenizer.tokens:
        writer.add_token_list(tokenizer.tokens)
        writer.add_token_types(tokenizer.types)
    if tokenizer.merges:
        writer.add_token_merges(tokenizer.merges)
    if tokenizer.scores:
        writer.add_token_scores(tokenizer.scores)
    for key, number in tokenizer.ids:
        writer.add_uint32(f"tokenizer.ggml.{key}", number)
    for key, value in tokenizer.switches:
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _write_tensors(
    gguf: ModuleType, writer: "GGUFWriter", tensors: Sequence[GgufTensor], types: Mapping[str, int]
) -> None:
    """Writes the head of the file, and then one tensor after another."""
    kinds = {tensor.name: gguf.GGMLQuantizationType(types[tensor.name]) for tensor in tensors}
    for tensor in tensors:
        rows = gguf.quant_shape_to_byte_shape(tensor.shape, kinds[tensor.name])
        writer.add_tensor_info(tensor.name, rows, np.dtype(np.uint8), math.prod(rows), kinds[tensor.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        values = tensor.values().float()
        rounded = values.half() if kinds[tensor.name] == gguf.GGMLQuantizationType.F16 else values
        check_finite(rounded, f"--to-gguf: {tensor.name}", values.dtype)
        writer.write_tensor_data(gguf.quants.quantize(values.numpy(), kinds[tensor.name]).view(np.uint8))
