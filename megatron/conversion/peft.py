"""PEFT's files of low-rank adapters, adapter_config.json and adapter_model.safetensors: written from a checkpoint of
adapters, and read into one.

PEFT gives every linear layer of a hub model its own A and B. A layer that is fused here, such as linear_qkv, is several
layers there. An adapter of the fused layer becomes one for each of them, with the same A. Adapters of parts (q_proj)
are the same on both sides, bit for bit.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.conversion.families import FAMILIES
from megatron.conversion.family import Family
from megatron.conversion.family_choice import choose_family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.importing import open_hub_model
from megatron.conversion.merging import (
    AdapterTensors,
    adapters_by_layer,
    base_of,
    config_of_adapters,
    open_adapters,
    part_named,
)
from megatron.conversion.model import BuildModel, build_on, canonical_shapes, vocab_size_of
from megatron.conversion.model_folder import CONFIG, new_folder, refuse_used
from megatron.conversion.tensor_mapping import HubTensor, hub_tensors
from megatron.core.adapters.attach import CHILD, add_adapters, is_adapter
from megatron.core.adapters.config import LoraConfig
from megatron.core.adapters.layers import WHOLE, RowPart
from megatron.core.adapters.targets import PARTS
from megatron.core.dist_checkpointing.checkpoint_selection import Log, open_newest
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.data_file import TensorEntry, write_data_file
from megatron.core.dist_checkpointing.folders import RELEASE, Step
from megatron.core.dist_checkpointing.safetensors_file import read_header, read_tensor
from megatron.core.dist_checkpointing.writing import SaveResult, save_streamed
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box, canonical_names, info_of
from megatron.core.utils.files import parse_json, read_regular_file
from megatron.training.adapters import BASE, Base, digest_of_checkpoint, digest_of_folder
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.inspection.run_description import describe_run
from megatron.training.trained_model import config_for_one_process

ADAPTER_CONFIG, ADAPTER_MODEL = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KINDS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
"""Our tensors of an adapter, and PEFT's."""
_ANY_ROWS = 1024
"""Rows of the embedding, which has no adapter, where their number is not known."""


@dataclass(frozen=True)
class HubLayer:
    """A linear layer of the hub model, and the part of ours that it is."""

    name: str
    layer: str
    """Path of our linear layer."""
    part: RowPart
    """The part of our layer's rows."""
    tensor: HubTensor
    """Which rows of a tensor [*rows, columns] of ours it has; `columns` stands for the rank."""
    is_transposed: bool

    def take(self, hub: Tensor, rank: int) -> Tensor:
        """Returns our rows [*rows of the part, rank] for PEFT's [out, rank]."""
        stored = hub.t().contiguous() if self.is_transposed else hub.contiguous()
        parts = [self.tensor.take(stored, box).view(box.shape) for box in self.tensor.boxes]
        if self.part.stop is not None:
            return parts[0]
        whole = hub.new_empty(*self.tensor.global_shape[:-1], rank)
        for box, values in zip(self.tensor.boxes, parts, strict=True):
            whole[box.slices] = values
        return whole

    def give(self, ours: Tensor, covers_whole: bool) -> Tensor:
        """Returns PEFT's rows [out, columns] of ours: [*rows, columns] of the whole layer, or of this part."""
        parts = [ours[box.slices] if covers_whole else ours for box in self.tensor.boxes]
        joined = self.tensor.join([part.contiguous().flatten() for part in parts]).view(self.tensor.shape)
        return joined.t().contiguous() if self.is_transposed else joined


def hub_layers(
    family: Family, config: PretrainConfig, shapes: Mapping[str, tuple[int, ...]], rank: int
) -> list[HubLayer]:
    """Returns the linear layers of a hub model that correspond to ours, whose weights have these shapes. Experts and
    layers whose rows are in no part of ours are left out."""
    mapping = family.tensors_of(config.flat())
    found = []
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        of_linear = name.endswith(".weight") and len(shape) > 1 and ".layers." in name
        if not of_linear or ".experts." in name or ".router." in name:
            continue
        for tensor in hub_tensors(mapping, {name: (*shape[:-1], rank)}):
            part = _part_of(layer, shape[:-1], tensor)
            if part is not None and not tensor.is_copy and tensor.name.endswith(".weight"):
                is_transposed = tensor.axes is not None and tensor.axes[0] == (len(shape) - 1,)
                found.append(HubLayer(tensor.name.removesuffix(".weight"), layer, part, tensor, is_transposed))
    return found


def _part_of(layer: str, rows: tuple[int, ...], tensor: HubTensor) -> RowPart | None:
    """Returns the part of a layer whose rows a hub tensor has; None if there is no such part."""
    if sum(box.numel for box in tensor.boxes) == Box.whole(tensor.global_shape).numel:
        return WHOLE
    (box,) = tensor.boxes if len(tensor.boxes) == 1 else (None,)
    for name, of_layer in PARTS.items() if box is not None else ():
        if of_layer != layer.rpartition(".")[2]:
            continue
        part = part_named(layer, rows, name)
        if part.stop is not None and box is not None and _box_of(part, tensor.global_shape) == box:
            return part
    return None


def _box_of(part: RowPart, shape: tuple[int, ...]) -> Box:
    assert part.stop is not None
    start, extent = [0] * len(shape), list(shape)
    start[part.axis], extent[part.axis] = part.start, part.stop - part.start
    return Box(tuple(start), tuple(extent))


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def export_adapters(
    root: Path,
    target: Path,
    build_model: BuildModel,
    *,
    step: Step | None = None,
    architecture: str | None = None,
    log: Log = print,
) -> list[str]:
    """Writes the adapters of a checkpoint under `root` as the folder `target`, which PEFT can load. Returns the names
    of the adapted layers of the hub model. Tensors keep their type.

    Raises UserError if `target` is not empty, if no architecture expresses the model, or if an adapter has no form in
    PEFT: one of experts, or of a part of a layer that is fused there too. `target` is complete or does not exist.
    """
    refuse_used(target)
    checkpoint = open_adapters(root, step, log)
    config = config_of_adapters(checkpoint)
    lora = config.adapters
    assert lora.lora_rank is not None
    family = choose_family(dataclasses.replace(config, adapters=LoraConfig()), architecture, FAMILIES)
    layers = hub_layers(family, config, canonical_shapes(config, build_model, _ANY_ROWS), lora.lora_rank)
    tensors: dict[str, Tensor] = {}
    adapted: list[HubLayer] = []
    for path, parts in adapters_by_layer(checkpoint).items():
        for name, kinds in parts.items():
            own = [each for each in layers if each.layer == path and (name == WHOLE.name or each.part.name == name)]
            if not own:
                what = "experts" if ".experts." in path else f"{name} of a layer that {family.architecture} fuses"
                raise UserError(
                    f"{path}: an adapter of {what} has no form in PEFT's files; make a whole model of it with "
                    "tools/checkpoint/adapters.py merge"
                )
            adapter = AdapterTensors.read(checkpoint, path, name, kinds)
            for layer in own:
                tensors |= _tensors_of(layer, adapter, covers_whole=name == WHOLE.name)
            adapted += own
    base = base_of(checkpoint)
    keys = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.folder if base.kind == "hub" else None,
        "r": lora.lora_rank,
        "lora_alpha": _whole(lora.lora_rank if lora.lora_alpha is None else lora.lora_alpha),
        "lora_dropout": lora.lora_dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "bias": "none",
        "fan_in_fan_out": any(layer.is_transposed for layer in adapted),
        "inference_mode": True,
        "target_modules": sorted(_words(adapted, layers)),
    }
    _write(target, tensors, keys)
    return [layer.name for layer in adapted]


def _tensors_of(layer: HubLayer, adapter: AdapterTensors, covers_whole: bool) -> dict[str, Tensor]:
    tensors = {"lora_a": adapter.lora_a, "lora_b": layer.give(adapter.lora_b, covers_whole)}
    if adapter.magnitude is not None:
        # As a column of each row, repeated to the width that the layer's boxes have.
        width = layer.tensor.global_shape[-1]
        columns = adapter.magnitude[..., None].expand(*adapter.magnitude.shape, width)
        tensors["magnitude"] = layer.give(columns, covers_whole)[:, 0].contiguous()
    return {f"{_PREFIX}{layer.name}.{_KINDS[kind]}": tensor for kind, tensor in tensors.items()}


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _words(adapted: Sequence[HubLayer], layers: Sequence[HubLayer]) -> set[str]:
    """Returns the shortest names that mean exactly the adapted layers: their last words, or their last two."""
    names = {layer.name for layer in adapted}
    others = {layer.name.rpartition(".")[2] for layer in layers if layer.name not in names}
    last = {name: name.rpartition(".")[2] for name in names}
    return {word if word not in others else ".".join(name.split(".")[-2:]) for name, word in last.items()}


def _write(target: Path, tensors: Mapping[str, Tensor], keys: Mapping[str, object]) -> None:
    entries = [TensorEntry(name, tuple(tensor.shape), tensor.flatten()) for name, tensor in sorted(tensors.items())]
    entries.sort(key=lambda entry: -entry.flat.dtype.itemsize)
    with new_folder(target, "exported") as (disk, aside):
        write_data_file(disk, aside / ADAPTER_MODEL, entries)
        disk.write_file(aside / ADAPTER_CONFIG, json.dumps(keys, indent=2, sort_keys=True).encode() + b"\n")


# ---------------------------------------------------------------------------------------------------------------------
# Reading

_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
"""Keys of adapter_config.json with a value that adapters here have. Other initial values (PiSSA, OLoRA, LoftQ) change
the weights of the model too, so the adapters belong to a model that no file has."""

_READ = (
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the names of tensors say it
    *("base_model_name_or_path", "task_type", "auto_mapping", "revision", "inference_mode", "peft_version"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),  # how training began or went
)
"""Keys that are read, or change nothing here. Any other key changes what adapters compute, unless it is empty or
false."""


def import_adapters(
    source: Path, root: Path, base: Path, build_model: BuildModel, *, log: Log = print
) -> tuple[SaveResult, list[str]]:
    """Writes PEFT's adapters in the folder `source` as the checkpoint `release` under `root`. `base` is the model that
    they adapt: a folder of the hub, or a folder of our checkpoints. Returns the checkpoint, and the flags of a run with
    these adapters. Tensors keep their type.

    Raises UserError, before anything is written, for another kind of adapter, for layers that the model does not have,
    for other shapes, and if a layer of a kind has an adapter and another layer of this kind has none.
    """
    refuse_used(root)
    keys = _read_config(source)
    words, family, vocab_size, record = _model_of(base, log)
    rank = int(keys["r"])
    config = config_for_one_process(words, [], has_cuda=False)
    layers = {
        each.name: each for each in hub_layers(family, config, canonical_shapes(config, build_model, vocab_size), rank)
    }
    tensors = dict(_converted(source, layers, rank))
    targets = sorted({_target(name) for name in tensors})
    flags = ["--lora-rank", str(rank), "--lora-alpha", str(keys["lora_alpha"])]
    flags += ["--lora-dropout", str(keys["lora_dropout"])] if keys.get("lora_dropout") else []
    flags += ["--use-rslora"] if keys.get("use_rslora") else []
    flags += ["--use-dora"] if keys.get("use_dora") else []
    flags += ["--lora-target-modules", *targets]
    described = {**words, "command_line": [*words["command_line"], *flags]}
    adapted = config_for_one_process(described, [], has_cuda=False)
    _check_shapes(source, tensors, adapted, build_model, vocab_size)
    chunks = [
        Chunk(name, tuple(value.shape), Box.whole(tuple(value.shape)), None, value) for name, value in tensors.items()
    ]
    saved = save_streamed(
        root,
        [chunks],
        lambda chunk: chunk.flat,
        step=RELEASE,
        common={},
        config={**describe_run(adapted), "command_line": described["command_line"], BASE: record.to_json()},
    )
    return saved, flags


def _read_config(source: Path) -> Json:
    path = source / ADAPTER_CONFIG
    try:
        keys = parse_json(read_regular_file(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(keys, dict) or keys.get("peft_type") != "LORA":
        found = keys.get("peft_type") if isinstance(keys, dict) else None
        raise UserError(f"{path}: peft_type is {found!r}; only 'LORA' can be imported")
    for key, value in keys.items():
        if key not in _READ and value not in _PLAIN.get(key, (None, False, [], {})):
            raise UserError(
                f"{path}: {key} is {value!r}, which adapters here do not have; merge them with PEFT "
                "(merge_and_unload) and import the whole model with tools/checkpoint/convert.py"
            )
    if not isinstance(keys.get("r"), int) or keys["r"] < 1 or not isinstance(keys.get("lora_alpha"), int | float):
        raise UserError(f"{path}: r must be a positive integer and lora_alpha a number")
    return keys


def _model_of(base: Path, log: Log) -> tuple[Json, Family, int, Base]:
    """Returns the description of the adapted model's run, its family, its rows, and the record of its weights."""
    if (base / CONFIG).is_file():
        hub = open_hub_model(base, base.absolute(), (), FAMILIES, log)
        _, words = hub.config_for_one_process()
        described = {"command_line": words, "model_family": hub.family.model_family}
        return described, hub.family, hub.vocab_size, Base("hub", str(base.absolute()), digest_of_folder(base))
    checkpoint = open_newest(base, None, log)
    manifest = checkpoint.manifest
    config = config_for_one_process(manifest.config, [], has_cuda=False)
    record = Base("checkpoint", str(base.absolute()), digest_of_checkpoint(manifest), manifest.iteration)
    return dict(manifest.config), choose_family(config, None, FAMILIES), vocab_size_of(checkpoint), record


def _converted(source: Path, layers: Mapping[str, HubLayer], rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yields our tensors of all adapters by their canonical names."""
    path = source / ADAPTER_MODEL
    for name, place in read_header(path).items():
        kind = next((ours for ours, theirs in _KINDS.items() if name.endswith(f".{theirs}")), None)
        module = name.removeprefix(_PREFIX).removesuffix(f".{_KINDS[kind]}") if kind is not None else ""
        if kind is None or module not in layers:
            known = ", ".join(sorted({each.rpartition(".")[2] for each in layers}))
            raise UserError(f"{path}: {name} is of no layer that can have an adapter here; the model has {known}")
        layer, values = layers[module], read_tensor(place)
        rows = sum(box.numel for box in layer.tensor.boxes) // rank
        expected = {"lora_a": (rank, None), "lora_b": (rows, rank), "magnitude": (rows,)}[kind]
        if len(values.shape) != len(expected) or any(
            want not in (None, size) for want, size in zip(expected, values.shape, strict=True)
        ):
            shape = [size if size is not None else "any" for size in expected]
            raise UserError(f"{path}: {name} has shape {list(values.shape)}; this model and r {rank} need {shape}")
        if kind == "lora_b":
            values = layer.take(values, rank)
        elif kind == "magnitude":
            values = layer.take(values[:, None].expand(rows, rank).contiguous(), rank)[..., 0].contiguous()
        yield f"{layer.layer}.{CHILD}.{layer.part.name}.{kind}", values


def _target(name: str) -> str:
    """Returns the word of --lora-target-modules for the adapter that a tensor belongs to."""
    layer, _, rest = name.partition(f".{CHILD}.")
    part = rest.partition(".")[0]
    return layer.rpartition(".")[2] if part == WHOLE.name else part


def _check_shapes(
    source: Path, tensors: Mapping[str, Tensor], config: PretrainConfig, build_model: BuildModel, vocab_size: int
) -> None:
    """Raises UserError unless the tensors are those of a run with these adapters."""
    model = build_on(torch.device("meta"), config, build_model, vocab_size)
    with torch.device("meta"):
        add_adapters(model, config.adapters, config.transformer)
    infos = (info_of(parameter) for _, parameter in canonical_names(model))
    wanted = {info.name: info.global_shape for info in infos if is_adapter(info.name)}
    for name, shape in wanted.items():
        if name not in tensors:
            raise UserError(
                f"{source}: {name.partition(f'.{CHILD}.')[0]} has no adapter, but other layers of its kind have one; "
                "here all of them have one"
            )
        if tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{source}: {name} has shape {list(tensors[name].shape)}, but the model needs {list(shape)}"
            )
