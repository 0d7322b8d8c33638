"""Optimizer state in legacy checkpoints: the flat buffers of a sharded optimizer, or the tensors of a plain one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.chunk import MASTER
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box
from megatron.training.conversion.flat_buffers import Bucket
from megatron.training.conversion.legacy_layout import EXPERTS, RankTensor
from megatron.training.conversion.megatron_names import SourceTensor, merges_into
from megatron.training.conversion.torch_archive import StoredTensor, TorchArchive

KINDS = ("exp_avg", "exp_avg_sq", MASTER)


@dataclass(frozen=True)
class _FlatTensor:
    """A flat buffer in a file."""

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def read(self, box: Box) -> Tensor:
        return self.stored.read(box.start[0], box.start[0] + box.shape[0])


def flat_buckets(path: Path) -> list[Bucket]:
    """Returns the buffers of a sharded optimizer, or of several that are chained. Raises UserError for the format of
    releases before 0.6."""
    content = TorchArchive(path).load()
    optimizers = content if isinstance(content, list) else [content]
    buckets: list[Bucket] = []
    for optimizer in optimizers:
        if not isinstance(optimizer, dict) or not optimizer.get("buckets_coalesced"):
            raise UserError(
                f"{path}: optimizer state in the format of releases before 0.6; let Megatron-LM save once more, or "
                "import with --no-load-optim"
            )
        for buffers in (value for key, value in optimizer.items() if isinstance(key, int)):
            for buffer in buffers.values():
                kinds = {"param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
                tensors = {kind: buffer.get(key) for kind, key in kinds.items()}
                if not all(isinstance(one, StoredTensor) and len(one.shape) == 1 for one in tensors.values()):
                    raise UserError(f"{path}: a buffer has no flat {', '.join(kinds)}")
                buckets.append({kind: _FlatTensor(one) for kind, one in tensors.items()})
    return buckets


def plain_states(
    saved: Any,
    names: Sequence[str],
    weights: Mapping[str, tuple[RankTensor, Box, SourceTensor]],
    shapes: Mapping[str, tuple[int, ...]],
    path: Path,
) -> Iterator[tuple[str, str, SourceTensor]]:
    """Yields the state of optimizers that are not sharded: parameters are numbered in the order of their groups."""
    optimizers = saved if isinstance(saved, list) else [saved]
    left = list(names)
    for optimizer in optimizers:
        if not isinstance(optimizer, dict):
            continue
        inner = optimizer.get("optimizer", optimizer)
        states, groups = inner.get("state"), inner.get("param_groups")
        masters = optimizer.get("fp32_from_fp16_params") or [[] for _ in groups or ()]
        if not isinstance(states, dict) or not isinstance(groups, list) or not states:
            continue
        for group, group_masters in zip(groups, masters, strict=False):
            numbers = group.get("params") or []
            chosen = _names_of_group(group, left, weights, len(numbers), path)
            left = [name for name in left if name not in chosen]
            for position, (number, name) in enumerate(zip(numbers, chosen, strict=True)):
                tensors = dict(states.get(number) or {})
                if position < len(group_masters):
                    tensors[MASTER] = group_masters[position]
                    _check_master(tensors[MASTER], weights[name][2], f"{path}: {weights[name][0].name}")
                for kind in KINDS:
                    stored = tensors.get(kind)
                    if isinstance(stored, StoredTensor):
                        if not merges_into(shapes[name], stored.shape):
                            raise UserError(
                                f"{path}: optimizer state {number} has shape {[*stored.shape]}, but the parameter at "
                                f"its place, {weights[name][0].name}, has shape {[*shapes[name]]}"
                            )
                        yield name, kind, SourceTensor(stored.dtype, stored.read)


def _names_of_group(
    group: Mapping[str, Any],
    left: Sequence[str],
    weights: Mapping[str, tuple[RankTensor, Box, SourceTensor]],
    count: int,
    path: Path,
) -> list[str]:
    """The parameters of a group: matrices have weight decay, biases and vectors do not; experts may be apart."""

    def belongs(name: str) -> bool:
        tensor = weights[name][0]
        decays = len(tensor.global_shape) > 1 and not tensor.name.endswith(".bias")
        return decays == (group.get("wd_mult", 1.0) != 0.0)

    chosen = [name for name in left if belongs(name)]
    if any(EXPERTS in weights[name][0].name for name in chosen):
        raise UserError(
            f"{path}: optimizer state of experts that is not sharded; let Megatron-LM save once with "
            "--use-distributed-optimizer, or import with --no-load-optim"
        )
    if len(chosen) != count:
        raise UserError(
            f"{path}: a parameter group has {count} parameters where the model has {len(chosen)}; which is which is "
            "not known. Import with --no-load-optim"
        )
    return chosen


def _check_master(master: Any, weight: SourceTensor, name: str) -> None:
    if not isinstance(master, StoredTensor) or not torch.equal(master.read().to(weight.dtype), weight.read()):
        raise UserError(f"{name}: the main weight at its place does not round to it; import with --no-load-optim")
