"""Optimizer state in legacy checkpoints: the flat buffers of a sharded optimizer, or the tensors of a plain one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.flat_buffers import Bucket
from megatron.conversion.megatron_lm.legacy_layout import EXPERTS
from megatron.conversion.megatron_lm.names import SourceTensor, merges_into
from megatron.conversion.megatron_lm.state_dict import StateTensor, concatenated
from megatron.conversion.megatron_lm.torch_archive import StoredTensor, TorchArchive
from megatron.conversion.model import RankTensor
from megatron.core.dist_checkpointing.chunk import MASTER
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

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


@dataclass(frozen=True)
class RankParameter:
    """A parameter of Megatron-LM's model on a rank: one of our weights, or one expert's part of it."""

    key: str
    """Name of our weight on the rank."""
    tensor: RankTensor
    values: SourceTensor
    shape: tuple[int, ...]

    @property
    def is_of_expert(self) -> bool:
        """Whether it belongs to a single expert, or to all experts of the rank."""
        return EXPERTS in self.tensor.name

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: it does to matrices, not to biases and vectors."""
        return len(self.tensor.global_shape) > 1 and not self.tensor.name.endswith(".bias")


def plain_states(
    saved: object, parameters: Sequence[RankParameter], path: Path
) -> Iterator[tuple[str, str, SourceTensor]]:
    """Yields the state of optimizers that are not sharded: name of our weight on the rank, kind, and all elements.

    Parameters are numbered in the order of their groups, and in a group in the order of the model, which `parameters`
    has. The experts of a weight have a parameter each, in any places of the model; their states are joined in order.
    """
    found: dict[tuple[str, str], dict[int, StateTensor]] = {}
    optimizers = saved if isinstance(saved, list) else [saved]
    left = list(range(len(parameters)))
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
            chosen = _parameters_of_group(group, left, parameters, len(numbers), path)
            taken = set(chosen)
            left = [place for place in left if place not in taken]
            for position, (number, place) in enumerate(zip(numbers, chosen, strict=True)):
                parameter = parameters[place]
                tensors = dict(states.get(number) or {})
                if position < len(group_masters):
                    tensors[MASTER] = group_masters[position]
                    _check_master(tensors[MASTER], parameter.values, f"{path}: {parameter.tensor.name}")
                for kind in KINDS:
                    stored = tensors.get(kind)
                    if isinstance(stored, StateTensor):
                        if not merges_into(parameter.shape, stored.shape):
                            raise UserError(
                                f"{path}: optimizer state {number} has shape {[*stored.shape]}, but the parameter at "
                                f"its place, {parameter.tensor.name}, has shape {[*parameter.shape]}"
                            )
                        found.setdefault((parameter.key, kind), {})[place] = stored
    yield from _joined(found, parameters, path)


def _joined(
    found: Mapping[tuple[str, str], Mapping[int, StateTensor]], parameters: Sequence[RankParameter], path: Path
) -> Iterator[tuple[str, str, SourceTensor]]:
    places_of: dict[str, list[int]] = {}
    for place, parameter in enumerate(parameters):
        places_of.setdefault(parameter.key, []).append(place)
    for (key, kind), by_place in found.items():
        places = places_of[key]
        if len(by_place) != len(places):
            raise UserError(
                f"{path}: {len(by_place)} of the {len(places)} experts of {parameters[places[0]].tensor.name} have the "
                f"optimizer state {kind}; import with --no-load-optim"
            )
        stored = [by_place[place] for place in places]
        yield key, kind, SourceTensor(stored[0].dtype, partial(concatenated, stored))


def _parameters_of_group(
    group: Mapping[str, object], left: Sequence[int], parameters: Sequence[RankParameter], count: int, path: Path
) -> list[int]:
    """Returns the places of the parameters of a group. Matrices have weight decay; biases and vectors do not. Experts
    have groups of their own if several ranks share them (`is_expert_parallel`), or are among the others."""
    decays = group.get("wd_mult", 1.0) != 0.0
    alike = [place for place in left if parameters[place].decays == decays]
    experts = [place for place in alike if parameters[place].is_of_expert]
    others = [place for place in alike if not parameters[place].is_of_expert]
    choices = [experts] if group.get("is_expert_parallel") else [alike, others, experts]
    for chosen in choices:
        if len(chosen) == count:
            return chosen
    raise UserError(
        f"{path}: a parameter group has {count} parameters, but the model has {len(choices[0])} of this kind; import "
        "with --no-load-optim"
    )


def _check_master(master: object, weight: SourceTensor, name: str) -> None:
    if not isinstance(master, StateTensor) or not torch.equal(master.read().to(weight.dtype), weight.read()):
        raise UserError(f"{name}: the main weight at its place does not round to it; import with --no-load-optim")
