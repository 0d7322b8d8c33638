"""Writes folders in Megatron-LM's torch_dist format: one data file of archives of torch.save, one for each layer of
each tensor, and `.metadata`. Optimizer state has the format of --dist-ckpt-optim-fully-reshardable."""

import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.exported_state import common_state, loss_scale, parameter_group
from megatron.conversion.megatron_lm.exported_tensors import MOMENTS, ExportedTensors
from megatron.conversion.megatron_lm.mixer_rows import RowOrder
from megatron.conversion.megatron_lm.names import ExportedNames
from megatron.core.dist_checkpointing.chunk import MASTER
from megatron.core.utils.torch_private import DistFolderWriter

DATA = "__0_0.distcp"


def write_dist_folder(tensors: ExportedTensors, folder: Path, with_optimizer: bool) -> int:
    """Writes all files of the folder; returns the bytes of the tensors."""
    names, writer, nbytes = tensors.names, DistFolderWriter(DATA), 0
    prefixes = {"": "", MASTER: "optimizer.state.param.", **{kind: f"optimizer.state.{kind}." for kind in MOMENTS}}
    with open(folder / DATA, "wb") as file:
        for kind, prefix in prefixes.items() if with_optimizer else [("", "")]:
            for weight, source, dtype in tensors.stored(kind):
                if kind == MASTER and not tensors.has_moments(weight):
                    continue
                values = tensors.read(weight, source, dtype)
                nbytes += values.nbytes
                for name, shape, part in _parts_of(
                    weight, tensors.shape_of(weight), values, tensors.orders.get(weight)
                ):
                    location = names.location(name)
                    lead = () if location.layer is None else (names.num_layers,)
                    offset = () if location.layer is None else (location.layer,)
                    start = (*offset, *(0 for _ in shape))
                    part = part.view((*(1 for _ in lead), *shape))
                    writer.add_tensor(file, prefix + location.name, (*lead, *shape), start, part)
        for name in _extra_states(names, tensors.shapes):
            writer.add_object(file, name, [None])
    (folder / ".metadata").write_bytes(pickle.dumps(writer.metadata()))
    torch.save(_common(tensors, with_optimizer), folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(
        json.dumps(backend | {"common_backend": "torch", "common_backend_version": 1})
    )
    return nbytes


def _common(tensors: ExportedTensors, with_optimizer: bool) -> dict[str, object]:
    checkpoint, config = tensors.checkpoint, tensors.config
    common = common_state(checkpoint, config)
    if with_optimizer:
        inner = {"param_groups": [parameter_group(checkpoint, config, decays) for decays in (True, False)]}
        optimizer: dict[str, object] = {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
        if scaler := loss_scale(checkpoint):
            optimizer["grad_scaler"] = scaler
        common["optimizer"] = optimizer
        common["content_metadata"] = {"distrib_optim_sharding_type": "fully_reshardable"}
    return common


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


_LINEAR = re.compile(r"(?:.*\.)?(?:linear_\w+|in_proj|out_proj|eh_proj|output_layer|self_attention|mlp)")
"""Names of linear layers. One takes the place of attention or of an MLP if it has its name."""


def is_linear(weight: str) -> bool:
    """Whether a weight is the matrix of a linear layer, which has an extra state in Transformer Engine."""
    return weight.endswith(".weight") and _LINEAR.fullmatch(weight.removesuffix(".weight")) is not None


def _extra_states(names: ExportedNames, shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yields the names of the entries for extra states of linear layers."""
    for weight, shape in shapes.items():
        if not is_linear(weight):
            continue
        location, layers = names.location(weight), names.num_layers
        experts = shape[0] if ".experts.linear_" in weight else 1
        stem = location.name.removesuffix(".weight")
        for expert in range(experts):
            index = [*([location.layer] if location.layer is not None else []), *([expert] if experts > 1 else [])]
            sizes = [*([layers] if location.layer is not None else []), *([experts] if experts > 1 else [])]
            yield f"{stem}._extra_state/shard_{'.'.join(map(str, index or [0]))}_{'.'.join(map(str, sizes or [1]))}"
