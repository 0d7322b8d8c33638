"""Merging: adapters and the model that they adapt become a whole model, one tensor at a time."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.conversion.importing import import_model
from megatron.conversion.model import BuildModel
from megatron.conversion.model_folder import refuse_used
from megatron.conversion.tokenizer_files import copy_tokenizer
from megatron.core.adapters.attach import CHILD, is_adapter
from megatron.core.adapters.config import LoraConfig
from megatron.core.adapters.layers import WHOLE, RowPart
from megatron.core.adapters.targets import parts_of_layer
from megatron.core.dist_checkpointing.checkpoint import Checkpoint
from megatron.core.dist_checkpointing.checkpoint_selection import Log, open_newest
from megatron.core.dist_checkpointing.chunk import Chunk, is_weight
from megatron.core.dist_checkpointing.folders import RELEASE, Step
from megatron.core.dist_checkpointing.planning import match
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.dist_checkpointing.writing import SaveResult, save_streamed
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
from megatron.training.adapters import Base, digest_of_checkpoint, digest_of_folder
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.trained_model import config_for_one_process


def merge_adapters(
    root: Path,
    target: Path,
    build_model: BuildModel,
    *,
    step: Step | None = None,
    base: Path | None = None,
    file_bytes: int = 4 << 30,
    log: Log = print,
) -> SaveResult:
    """Writes the model of the adapters under `root` as the checkpoint `release` under `target`: W + s B A, computed in
    float32 at least and rounded once to the type of W.

    The adapted model is the one that the adapters' checkpoint names, or that in the folder `base`. Raises UserError if
    its weights are not those that the adapters were trained with, or if `target` holds a checkpoint already.
    """
    refuse_used(target)
    adapters = open_adapters(root, step, log)
    config = config_of_adapters(adapters)
    record = base_of(adapters)
    folder = Path(base or record.folder)
    if record.kind == "checkpoint":
        return _merge(adapters, config, _base_checkpoint(folder, record), target, file_bytes)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the adapted model with --base")
    record.check(digest_of_folder(folder), folder)
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}-") as between:
        tokenizer = target.absolute() / "tokenizer"
        import_model(folder, Path(between), build_model, file_bytes=file_bytes, tokenizer=tokenizer, log=log)
        saved = _merge(adapters, config, open_newest(Path(between), None, log), target, file_bytes)
    copy_tokenizer(folder, tokenizer)
    return saved


def open_adapters(root: Path, step: Step | None, log: Log) -> Checkpoint:
    """Opens the newest checkpoint under `root`, or that of iteration `step`. Raises UserError if it is one of a whole
    model."""
    checkpoint = open_newest(root, step, log)
    if Base.of(checkpoint.manifest.config) is None:
        raise UserError(f"{checkpoint.folder} is a checkpoint of a whole model, not of adapters (--lora-rank)")
    return checkpoint


def base_of(adapters: Checkpoint) -> Base:
    """Returns the model that the adapters of `open_adapters` belong to."""
    base = Base.of(adapters.manifest.config)
    assert base is not None
    return base


def config_of_adapters(checkpoint: Checkpoint) -> PretrainConfig:
    """Returns the settings of the run that trained adapters, for one process."""
    return config_for_one_process(checkpoint.manifest.config, [], has_cuda=False)


def _base_checkpoint(folder: Path, record: Base) -> Checkpoint:
    try:
        found = open_newest(folder, record.iteration or RELEASE, lambda sentence: None)
    except UserError as error:
        raise UserError(f"{error}; name the adapted model with --base") from error
    record.check(digest_of_checkpoint(found.manifest), found.folder)
    return found


def _merge(adapters: Checkpoint, config: PretrainConfig, base: Checkpoint, target: Path, file_bytes: int) -> SaveResult:
    by_layer = adapters_by_layer(adapters)
    names = [name for name in base.catalogue if is_weight(name)]
    unknown = sorted(layer for layer in by_layer if f"{layer}.weight" not in base.catalogue)
    if unknown:
        raise UserError(f"{adapters.folder}: {unknown[0]} is no layer of the model in {base.folder}")
    values_of = partial(_merged, adapters=adapters, base=base, lora=config.adapters, by_layer=by_layer)
    files = _files(base, names, file_bytes)
    return save_streamed(target, files, values_of, step=RELEASE, common={}, config=base.manifest.config)


def _files(base: Checkpoint, names: list[str], file_bytes: int) -> Iterator[list[Chunk]]:
    """Yields the whole tensors of each file of the merged checkpoint, without memory."""
    file: list[Chunk] = []
    for name in names:
        stored = base.catalogue[name][0].chunk
        shape = stored.global_shape
        file.append(Chunk(name, shape, Box.whole(shape), None, torch.empty(shape, dtype=stored.dtype, device="meta")))
        if sum(chunk.tensor.nbytes for chunk in file) >= file_bytes:
            yield file
            file = []
    if file:
        yield file


def adapters_by_layer(checkpoint: Checkpoint) -> dict[str, dict[str, set[str]]]:
    """Returns the adapters of a checkpoint: for each linear layer, by its path, the names of its parts, and for each
    part the names of its tensors (lora_a, lora_b, magnitude)."""
    found: dict[str, dict[str, set[str]]] = {}
    for name in checkpoint.catalogue:
        if is_adapter(name) and is_weight(name):
            layer, _, rest = name.partition(f".{CHILD}.")
            part, _, kind = rest.partition(".")
            found.setdefault(layer, {}).setdefault(part, set()).add(kind)
    return found


def read_whole(checkpoint: Checkpoint, name: str) -> Tensor:
    """Returns a tensor of a checkpoint in its stored type and canonical shape."""
    stored = checkpoint.catalogue[name][0].chunk
    values = torch.empty(stored.global_shape, dtype=stored.dtype)
    chunk = Chunk(name, stored.global_shape, Box.whole(stored.global_shape), None, values)
    fill_tensors(checkpoint, match([chunk], checkpoint.catalogue))
    return values


@dataclass(frozen=True)
class AdapterTensors:
    """One adapter as whole tensors in their canonical shapes."""

    lora_a: Tensor
    lora_b: Tensor
    magnitude: Tensor | None

    @classmethod
    def read(cls, checkpoint: Checkpoint, layer: str, part: str, kinds: set[str]) -> "AdapterTensors":
        """Reads an adapter of a checkpoint."""
        prefix = f"{layer}.{CHILD}.{part}"
        magnitude = read_whole(checkpoint, f"{prefix}.magnitude") if "magnitude" in kinds else None
        return cls(read_whole(checkpoint, f"{prefix}.lora_a"), read_whole(checkpoint, f"{prefix}.lora_b"), magnitude)

    def merged(self, rows: Tensor, scale: float) -> Tensor:
        """Returns the adapted rows of a weight [..., in], whose canonical dimensions those of B begin with."""
        lead = self.lora_a.dim() - 2  # 1 for experts
        matrix = (*rows.shape[:lead], -1, rows.shape[-1])
        b = self.lora_b.to(rows.dtype).reshape(*rows.shape[:lead], -1, self.lora_b.shape[-1])
        total = rows.reshape(matrix) + scale * (b @ self.lora_a.to(rows.dtype))
        if self.magnitude is not None:
            total *= (self.magnitude.to(rows.dtype).flatten() / total.square().sum(-1).sqrt())[:, None]
        return total.view(rows.shape)


def part_named(layer: str, rows: tuple[int, ...], name: str) -> RowPart:
    """Returns the part of a layer's rows that has this name. `layer` is the layer's path."""
    if name == WHOLE.name:
        return WHOLE
    (part,), _ = parts_of_layer(layer.rpartition(".")[2], rows, [name])
    return part


def _merged(
    chunk: Chunk,
    *,
    adapters: Checkpoint,
    base: Checkpoint,
    lora: LoraConfig,
    by_layer: Mapping[str, Mapping[str, set[str]]],
) -> Tensor:
    """Returns the elements of a tensor of the merged model, one-dimensional."""
    values, layer = read_whole(base, chunk.name), chunk.name.removesuffix(".weight")
    if not chunk.name.endswith(".weight") or layer not in by_layer:
        return values.flatten()
    wide = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
    for name, kinds in by_layer[layer].items():
        adapter = AdapterTensors.read(adapters, layer, name, kinds)
        lead = adapter.lora_a.dim() - 2
        part = part_named(layer, tuple(wide.shape[lead:-1]), name)
        own = wide if part.stop is None else wide.narrow(lead + part.axis, part.start, part.stop - part.start)
        if own.shape[:-1] != adapter.lora_b.shape[:-1] or own.shape[-1] != adapter.lora_a.shape[-1]:
            raise UserError(
                f"{adapters.folder}: the adapter {name} of {layer} is for {list(adapter.lora_b.shape[:-1])} rows and "
                f"{adapter.lora_a.shape[-1]} columns, but {base.folder} has {list(own.shape[:-1])} and {own.shape[-1]}"
            )
        own.copy_(adapter.merged(own, lora.lora_scale))
    return wide.to(values.dtype).flatten()
