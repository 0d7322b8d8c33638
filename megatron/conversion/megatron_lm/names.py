"""Names and shapes of Megatron-LM's checkpoints for the canonical tensors of a model.

Their torch_dist format stacks the tensors of all layers along a leading axis, under a name without the layer's number,
if all layers have the same tensors, but never those of hybrid models. Norms have the names of Transformer Engine's
fused layers, where these exist. Their shapes are ours with some neighbouring axes merged (the heads of `linear_qkv`,
the gate and up halves of `linear_fc1`), so the elements have the same order; the vocabulary is padded. Tensors whose
rows have another order are those of `mixer_rows`.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.chunk import MASTER
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Canonical tensors with a row per token id."""

KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "param": MASTER, "fp32_param": MASTER}
"""Kinds of optimizer state in their names, and ours."""

_LAYER = re.compile(r"(?P<stack>.*?\blayers)\.(?P<layer>\d+)\.(?P<rest>.*)")
_NORM = re.compile(
    r"(?P<layer>.*\.)(?P<norm>input_layernorm|pre_mlp_layernorm|self_attention\.(?:q|kv)_layernorm)\.(?P<kind>\w+)"
)
_FUSED = (
    (r"(^|\.)input_layernorm\.(\w+)$", r"\1self_attention.linear_qkv.layer_norm_\2"),
    (r"(^|\.)input_layernorm\.(\w+)$", r"\1self_attention.in_proj.layer_norm_\2"),
    (r"(^|\.)input_layernorm\.(\w+)$", r"\1mixer.in_proj.layer_norm_\2"),
    (r"(^|\.)input_layernorm\.(\w+)$", r"\1self_attention.layer_norm_\2"),  # one linear layer in its place
    (r"(^|\.)input_layernorm\.(\w+)$", r"\1norm.\2"),  # Mamba-2, not fused
    (r"(^|\.)pre_mlp_layernorm\.(\w+)$", r"\1mlp.linear_fc1.layer_norm_\2"),
    (r"(^|\.)pre_mlp_layernorm\.(\w+)$", r"\1mlp.layer_norm_\2"),
    (r"(^|\.)q_layernorm\.(\w+)$", r"\1linear_q_up_proj.layer_norm_\2"),
    (r"(^|\.)kv_layernorm\.(\w+)$", r"\1linear_kv_up_proj.layer_norm_\2"),
)
"""Norms that Transformer Engine computes together with the linear layer behind them."""
_EXPERTS = (r"\bmlp\.experts\.(?=linear_)", "mlp.experts.experts.")
_INDEXER = (r"\bself_attention\.indexer\.", "self_attention.core_attention.indexer.")
_MAMBA = (
    (r"\bself_attention\.norm_weight$", "self_attention.norm.weight"),
    (r"\bself_attention\.(?=(norm|A_log|D|dt_bias|in_proj|conv1d|out_proj)\b)", "mixer."),
)
_HYBRID = (
    (r"^decoder\.final_layernorm\.", "decoder.final_norm."),
    (r"\.transformer_layer\.(?=self_attention|input_layernorm|mixer)", ".mtp_model_layer.layers.0."),
)
_SECOND_OF_DEPTH = (r"\.transformer_layer\.(?=mlp|pre_mlp_layernorm)", ".mtp_model_layer.layers.1.")
_ONLY_OF_DEPTH = (r"\.transformer_layer\.(?=mlp|pre_mlp_layernorm)", ".mtp_model_layer.layers.0.")
"""A depth of multi-token prediction of a hybrid model has a layer for each letter."""
_CONVOLUTION = (r"\.mixer\.conv1d\.(weight|bias)$", r".mixer.conv1d_\1")
_LAYER_OF_DEPTH = (r"\.transformer_layer\.", ".mtp_model_layer.")
"""In modules since 0.19; torch_dist folders keep the older names."""
_ALIASES = (
    *(_EXPERTS, _INDEXER, *_MAMBA, *_HYBRID, _SECOND_OF_DEPTH, _ONLY_OF_DEPTH),
    *(_LAYER_OF_DEPTH, _CONVOLUTION),
)


@dataclass(frozen=True)
class Location:
    """Where their checkpoint holds a canonical tensor."""

    name: str
    layer: int | None
    """Index in the leading axis, if the tensors of all layers are stacked."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor that can be read: its type, and a function that returns its elements, one-dimensional."""

    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass
class Found:
    """The tensors of a checkpoint by our names."""

    tensors: dict[str, SourceTensor] = field(default_factory=dict)
    """Weights by canonical name, and optimizer state by `optimizer_state_name`."""
    dropped: set[str] = field(default_factory=set)
    """Names of what is left behind on purpose: random states, and Transformer Engine's extra states."""
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        """Adds a tensor by our name."""
        self.tensors[name] = SourceTensor(dtype, read)


def possible_locations(name: str) -> Iterator[Location]:
    """Yields the locations where a checkpoint may hold a canonical tensor, the usual ones first."""
    for spelling in spellings(name):
        found = _LAYER.fullmatch(spelling)
        if found is not None:
            yield Location(f"{found['stack']}.{found['rest']}", int(found["layer"]))
        yield Location(spelling, None)


def spellings(name: str) -> Iterator[str]:
    """Yields the names that a canonical tensor, or one of a rank, may have in Megatron-LM, the usual ones first."""
    names = [name]
    for pattern, replacement in _ALIASES:
        names += [other for other in (re.sub(pattern, replacement, known) for known in names) if other not in names]
    for known in reversed(names):
        fused = [re.sub(pattern, replacement, known) for pattern, replacement in _FUSED]
        yield from (other for other in fused if other != known)
        yield known


def location_of(name: str, shapes: Mapping[str, Sequence[int]]) -> Location | None:
    """Returns the location of a canonical tensor in a checkpoint with tensors of these shapes; None if it has none."""
    for location in possible_locations(name):
        if location.name in shapes and (location.layer is None or len(shapes[location.name]) > 1):
            return location
    return None


def box_in(location: Location, theirs: Sequence[int], name: str, ours: Sequence[int]) -> Box:
    """Returns the box of their tensor that has the elements of a canonical tensor, in the same order.

    `theirs` and `ours` are the shapes of the whole tensors. Raises UserError if they do not fit, naming both.
    """
    inner = tuple(theirs) if location.layer is None else tuple(theirs[1:])
    wanted = inner
    if name in VOCABULARY and inner[0] > ours[0]:
        wanted = (ours[0], *inner[1:])
    layer_exists = location.layer is None or location.layer < theirs[0]
    if not layer_exists or not merges_into(tuple(ours), wanted):
        raise UserError(
            f"{name} has shape {list(ours)} by the flags of the model, but {location.name} has shape {list(theirs)}"
        )
    if location.layer is None:
        return Box((0,) * len(wanted), wanted)
    return Box((location.layer, *(0,) * len(wanted)), (1, *wanted))


def merges_into(ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether merging neighbouring dimensions of `ours` gives `theirs`."""
    at = 0
    for size in theirs:
        product = 1
        while at < len(ours) and product < size:
            product *= ours[at]
            at += 1
        if product != size:
            return False
    return all(size == 1 for size in ours[at:]) and math.prod(ours) == math.prod(theirs)


_MODULES_IF_LOCAL = ("self_attention.linear_qkv", "self_attention", "mlp.linear_fc1", "mlp")
"""Linear layers before which Megatron-LM's own layers have the norm as a module. Their torch_dist folders name it as
if it were fused."""


@dataclass(frozen=True)
class ExportedNames:
    """The names that the tensors of a model get in an export."""

    names: Collection[str]
    """All canonical names of the model."""
    is_hybrid: bool = False
    is_local: bool = False
    """Whether Megatron-LM's own layers load the export (`--transformer-impl local`), not those of Transformer
    Engine."""
    is_described: bool = False
    """Whether layers have sizes of their own (`heterogeneous`), so that no tensor can hold those of all layers."""

    @cached_property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return len(self._layers)

    @cached_property
    def is_stacked(self) -> bool:
        """Whether the tensors of all layers are one."""
        differ = self.is_hybrid or self.is_described
        return not differ and len({frozenset(names) for names in self._layers.values()}) == 1

    @cached_property
    def _layers(self) -> dict[str, set[str]]:
        """Names inside each layer of the decoder."""
        layers: dict[str, set[str]] = {}
        for name in self.names:
            found = _LAYER.fullmatch(name)
            if found is not None and found["stack"] == "decoder.layers":
                layers.setdefault(found["layer"], set()).add(found["rest"])
        return layers

    def location(self, name: str) -> Location:
        """Returns the location of a canonical tensor, or of a part of it (`mixer_rows`)."""
        norm = _NORM.fullmatch(name)
        linear = None if norm is None else self._fused_into(norm["layer"], norm["norm"])
        if norm is not None and linear is not None:
            name = f"{norm['layer']}{linear}.layer_norm_{norm['kind']}"
        for pattern, replacement in self._aliases(name):
            name = re.sub(pattern, replacement, name)
        found = _LAYER.fullmatch(name)
        if found is None or not self.is_stacked or found["stack"] != "decoder.layers":
            return Location(name, None)
        return Location(f"{found['stack']}.{found['rest']}", int(found["layer"]))

    def in_module(self, name: str) -> str:
        """Returns the name of a canonical tensor in the state dict of the module, whose experts are one tensor here."""
        norm = _NORM.fullmatch(name)
        linear = None if norm is None else self._fused_into(norm["layer"], norm["norm"])
        is_module = self.is_local and linear in _MODULES_IF_LOCAL
        if norm is not None and linear is not None and not is_module:
            name = f"{norm['layer']}{linear}.layer_norm_{norm['kind']}"
        for pattern, replacement in self._aliases(name):
            name = name if pattern == _EXPERTS[0] else re.sub(pattern, replacement, name)
        return re.sub(*_CONVOLUTION, re.sub(*_LAYER_OF_DEPTH, name))

    def _fused_into(self, layer: str, norm: str) -> str | None:
        """Returns the linear layer that a norm belongs to; None if the norm is a module of its own."""
        latent = self._has(layer, "linear_kv_up_proj")
        if norm == "input_layernorm":
            fused = ("self_attention.linear_qkv", "self_attention.in_proj", "self_attention")
            return next((name for name in fused if f"{layer}{name}.weight" in self.names), None)
        if norm == "pre_mlp_layernorm" and f"{layer}mlp.weight" in self.names:
            return "mlp"
        if norm == "pre_mlp_layernorm":
            is_fused = not latent if self.is_local else f"{layer}mlp.router.weight" not in self.names
            return "mlp.linear_fc1" if is_fused else None
        is_fused = latent and not self.is_local and not self._has(layer, "indexer.linear_wk")
        return norm.replace("_layernorm", "_up_proj").replace(".", ".linear_") if is_fused else None

    def _has(self, layer: str, linear: str) -> bool:
        return f"{layer}self_attention.{linear}.weight" in self.names

    def _aliases(self, name: str) -> Iterator[tuple[str, str]]:
        yield from (_EXPERTS, _INDEXER)
        if f"{name.partition('self_attention.')[0]}self_attention.D" in self.names:
            yield from _MAMBA
        if self.is_hybrid:
            yield from _HYBRID
            depth = name.partition("mlp.")[0]
            yield _SECOND_OF_DEPTH if f"{depth}input_layernorm.weight" in self.names else _ONLY_OF_DEPTH


def exported_shape(name: str, shape: Sequence[int], divisor: int) -> tuple[int, ...]:
    """Returns the shape that a canonical tensor gets in an export: matrices [out, in], biases [out], both with a
    leading axis for experts, and a vocabulary that `divisor` divides."""
    experts, rest = (tuple(shape[:1]), tuple(shape[1:])) if ".experts.linear_" in name else ((), tuple(shape))
    if name in VOCABULARY:
        rest = (-(-rest[0] // divisor) * divisor, *rest[1:])
    is_matrix = len(rest) > 1 and name.endswith("weight")
    return (*experts, math.prod(rest[:-1]), rest[-1]) if is_matrix else (*experts, math.prod(rest))
