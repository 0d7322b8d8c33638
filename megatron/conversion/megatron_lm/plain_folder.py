"""Checkpoints in the formats torch_dcp and fsdp_dtensor: state dicts of whole modules, written by
torch.distributed.checkpoint.

Weights are called `model.NAME`, with the names of a module, layer by layer. fsdp_dtensor stores main weights in place
of weights, gate and up of an MLP apart, as `linear_fc1.weight_w` and `linear_fc1.weight_v`, and optimizer state as
`optimizer.state.module.module.NAME.exp_avg`. torch_dcp numbers optimizer state (`numbered_state`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.legacy_layout import ModelLayout, TensorsOf
from megatron.conversion.megatron_lm.names import KINDS, Found
from megatron.conversion.megatron_lm.numbered_state import is_numbered, numbered_states
from megatron.conversion.megatron_lm.state_dict import StateTensor, StoredPart, add_parts, fit_state_dict
from megatron.conversion.megatron_lm.torch_dist import DistFolder, DistTensor
from megatron.core.dist_checkpointing.chunk import optimizer_state_name
from megatron.core.dist_checkpointing.planning import describe_names
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

_WEIGHT = re.compile(r"model\.(?:module\.)*(?P<name>.*)")
_STATE = re.compile(rf"optimizer\.state\.(?:module\.)*(?P<name>[a-z]\w*\..*)\.(?P<kind>{'|'.join(KINDS)})")
_STEP = re.compile(r"optimizer\..*\.step")
_SCALER = "optimizer.grad_scaler."
_DROPPED = re.compile(
    rf"(rng_state|rerun_state_machine_state|rerun_state_machine)\b.*|{_STEP.pattern}|{re.escape(_SCALER)}\w+"
)
_SCHEDULE = "opt_param_scheduler."


@dataclass(frozen=True)
class _Joined:
    """A stored tensor, or several along their first dimension."""

    parts: tuple[DistTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self) -> Tensor:
        return torch.cat([part.read(Box.whole(part.shape)) for part in self.parts])


def is_plain(folder: DistFolder) -> bool:
    """Whether a folder has one of these formats."""
    return any(_WEIGHT.fullmatch(name) for name in folder.tensors)


class PlainSource:
    """A checkpoint in one of these formats."""

    def __init__(self, folder: DistFolder, tensors_of: TensorsOf) -> None:
        self.folder = folder
        self._tensors_of = tensors_of

    def common(self) -> dict[Any, Any]:
        """Returns the entries that are no tensors, with those of the schedule together, and the number of steps."""
        values = {name: self.folder.object(name) for name in self.folder.objects if "." not in name}
        schedule = [name for name in self.folder.objects if name.startswith(_SCHEDULE)]
        steps = [name for name in self.folder.objects if _STEP.fullmatch(name)]
        return {
            **values,
            "opt_param_scheduler": {name.removeprefix(_SCHEDULE): self.folder.object(name) for name in schedule},
            "optimizer": [*({"step": self.folder.object(name)} for name in steps), *self._counts()],
        }

    def _counts(self) -> list[dict[str, float]]:
        """Returns the numbers of steps that are tensors, and the state of the loss scale."""
        single = {name: tensor for name, tensor in self.folder.tensors.items() if math.prod(tensor.shape) == 1}
        read = {
            name: float(tensor.read(Box.whole(tensor.shape)))
            for name, tensor in single.items()
            if _STEP.fullmatch(name) or name.startswith(_SCALER)
        }
        steps = {value for name, value in read.items() if not name.startswith(_SCALER)}
        scaler = {name.removeprefix(_SCALER): value for name, value in read.items() if name.startswith(_SCALER)}
        return [*({"step": step} for step in steps), scaler]

    def find(self, shapes: Mapping[str, Sequence[int]], with_optimizer: bool) -> Found:
        """Returns the tensors by our names. Raises UserError for those that are missing, do not fit or are unknown."""
        found, path = Found(), self.folder.path
        (tensors,) = self._tensors_of(ModelLayout(), 0)
        states = self._states()
        fitted = list(fit_state_dict(tensors, states[""], 0, path))
        parts = [(one.tensor.name, StoredPart(one.box, one.values)) for one in fitted]
        if with_optimizer:
            parts += [
                (optimizer_state_name(kind, one.tensor.name), StoredPart(one.box, one.values))
                for kind, state in states.items()
                if kind
                for one in fit_state_dict(tensors, state, 0, path)
            ]
            numbered = {name: _Joined((one,)) for name, one in self.folder.tensors.items() if is_numbered(name)}
            parts += [
                (optimizer_state_name(kind, one.tensor.name), StoredPart(one.box, values))
                for one, kind, values in numbered_states(self.folder, numbered, fitted, states[""])
            ]
        add_parts(found, parts, shapes, path)
        others = {name for name in self.folder.tensors if not _WEIGHT.fullmatch(name)}
        found.dropped = {name for name in others if _DROPPED.fullmatch(name)}
        found.dropped |= {name for name in self.folder.objects if name.startswith("model.")}
        others -= found.dropped
        if not with_optimizer:
            found.dropped |= {name for name in others if name.startswith("optimizer.")}
        unknown = {name for name in others - found.dropped if not _STATE.fullmatch(name) and not is_numbered(name)}
        if unknown:
            raise UserError(
                f"{path}: {describe_names(unknown)}: these tensors are not known; import with --no-load-optim if they "
                "are of the optimizer, or convert the checkpoint with Megatron-LM's --ckpt-convert-format torch_dist"
            )
        return found

    def _states(self) -> dict[str, dict[str, StateTensor]]:
        """Returns the state dicts by kind of optimizer state; "" is that of the weights."""
        parts: dict[str, dict[str, list[DistTensor]]] = {"": {}}
        for name, tensor in sorted(self.folder.tensors.items(), key=lambda item: _place_of_half(item[0])):
            weight, state = _WEIGHT.fullmatch(name), _STATE.fullmatch(name)
            if weight is not None and "_extra_state" not in name:
                parts[""].setdefault(_without_half(weight["name"]), []).append(tensor)
            elif state is not None:
                of_kind = parts.setdefault(KINDS[state["kind"]], {})
                of_kind.setdefault(_without_half(state["name"]), []).append(tensor)
        return {kind: {name: _Joined(tuple(each)) for name, each in some.items()} for kind, some in parts.items()}


def _without_half(name: str) -> str:
    return re.sub(r"(linear_fc1\.(?:weight|bias)\d*)_[wv]$", r"\1", name)


def _place_of_half(name: str) -> bool:
    """Whether a name is that of the second half, which follows the first: `_v`, of up, follows `_w`, of the gate."""
    return re.search(r"linear_fc1\.(?:weight|bias)\d*_v\b", name) is not None
