"""Which kernels compute a model on a device: records, whose text is a line of the log."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.ops.attention.kernels import SDPA_CUDA
from megatron.core.ops.attention.sdpa import first_usable_kernel
from megatron.core.tensor_parallel.overlap import cuts_products
from megatron.core.transformer.dot_product_attention import DotProductAttention

_WITHOUT_TRITON = (
    " (Triton cannot be imported: it would bring our own kernels for norms, rotary positions, dropout, activations, "
    "losses, experts and attention, which are faster)"
)
_IN_PIECES = "; ours, too: linear layers whose products are cut (--tp-comm-overlap)"


@dataclass(frozen=True)
class BackendInUse:
    """A backend that layers have."""

    name: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class AttentionInUse:
    """The kernels that compute attention in some layers."""

    crosses: bool
    """Whether it is cross attention."""
    kernels: tuple[str, ...]
    """Names of the kernels of training and of evaluation; on a GPU, the kernel that torch selects."""
    why: str
    """Those names, with the reasons for the choice."""
    device_type: str
    layers: tuple[int, ...]

    def __str__(self) -> str:
        first, last = min(self.layers), max(self.layers)
        which = f"layers {first} to {last}" if last > first else f"layer {first}"
        kind = "cross attention" if self.crosses else "attention"
        return f"{kind} of {which} on {self.device_type}: {self.why}"


def kernels_in_use(
    model: nn.Module, device: torch.device, packed: bool = False
) -> Iterator[BackendInUse | AttentionInUse]:
    """Yields the backends of a model, and one record for each kind of kernel that computes attention. `packed`: rows
    hold several documents."""
    layers = [module for module in model.modules() if isinstance(module, DotProductAttention)]
    yield from dict.fromkeys(_backend_of(layer, device) for layer in layers)
    kinds: dict[AttentionInUse, list[int]] = {}
    for layer in layers:
        found = attention_of_layer(layer, device, packed)
        kinds.setdefault(dataclasses.replace(found, layers=()), []).extend(found.layers)
    for kind, numbers in kinds.items():
        yield dataclasses.replace(kind, layers=tuple(numbers))


def attention_of_layer(layer: DotProductAttention, device: torch.device, packed: bool = False) -> AttentionInUse:
    """Returns the kernels that compute the attention of one layer."""
    plan = layer.plan if layer.context is None else layer.context.plan_in_use
    choices = plan.choices_on(device.type, packed)
    kernels = tuple(choice.kernel.name for choice in choices)
    why = (layer.context or layer.plan).describe(device.type, packed)
    if device.type == "cuda" and any(SDPA_CUDA.name in choice.names for choice in choices):
        config, (width, value_width) = layer.config, layer.widths
        heads = config.num_attention_heads, config.num_query_groups or 1
        name = f"SDPA ({first_usable_kernel(width, *heads, config.params_dtype, value_width)})"
        kernels = tuple(name if kernel == SDPA_CUDA.name else kernel for kernel in kernels)
        why = why.replace(SDPA_CUDA.name, name)
    return AttentionInUse(layer.crosses, kernels, why, device.type, (layer.layer_number,))


def _backend_of(layer: DotProductAttention, device: torch.device) -> BackendInUse:
    backend = layer.backend
    plain = backend.name.startswith("local")
    missing = device.type == "cuda" and plain and layer.config.transformer_impl != "local"
    in_pieces = backend.engine is not None and backend.fp8 is None and cuts_products(layer.config)
    more = _WITHOUT_TRITON if missing else _IN_PIECES if in_pieces else ""
    return BackendInUse(backend.name, backend.describe(device.type) + more)
