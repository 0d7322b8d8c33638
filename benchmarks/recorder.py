"""Records the operations of a micro-batch: products, attention, the bytes that memory-bound operations move, and the
FLOPs and bytes of other operations. A memory-bound operation counts as reading its inputs once and writing its outputs
once. The sum of two gradients at a residual counts as part of the norm that reads the residual. benchmarks/floor.py
times the recorded operations.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megatron.core import backends
from megatron.core.backends import Backend
from megatron.core.ops.attention.blocks import BlockCall, BlockOffsets
from megatron.core.ops.attention.indexer import HiddenKeys
from megatron.core.ops.attention.kernels import BlockKernel
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, hidden_keys
from megatron.core.ops.fp8.quantize import Quantized
from megatron.core.tensor_parallel.overlap import ProductsInPieces
from megatron.core.transformer import sparse_latent_attention
from megatron.diagnosis.planning.work import STATE_PRODUCTS, Product

_QUERIES_AT_ONCE = 1024
"""Queries whose pairs are counted at once."""


@dataclass(frozen=True, eq=False)
class Attention:
    """A call of an attention kernel, without its data."""

    compute: Callable[..., Tensor]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    variant: AttentionVariant
    call: AttentionCall
    seen: int | None = None
    """With a mask of queries and keys, such as that of an indexer: number of pairs of which the query sees the key."""

    @property
    def key(self) -> Any:
        """A key that is equal for calls that take equally long."""
        bounds = self.call.cu_seqlens
        documents = None if bounds is None else tuple(bounds.tolist())
        return self.shapes, self.strides, self.variant, documents, self.seen

    @property
    def pairs(self) -> int:
        """Number of all pairs of a query and a key."""
        (queries, batch, *_), (keys, *_), _ = self.shapes
        return queries * keys * batch

    @property
    def flops(self) -> float:
        """Floating point operations of forward: of the pairs seen, or without a mask as Megatron-LM counts them, half
        of all pairs."""
        (*_, heads, width), _, (*_, value_width) = self.shapes
        seen = self.pairs / 2 if self.seen is None else self.seen
        return 2.0 * seen * heads * (width + value_width)


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """A call of an attention kernel for a block of queries and keys of rows that are split over ranks, without its
    data."""

    kernel: BlockKernel
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    offsets: BlockOffsets
    variant: AttentionVariant
    call: BlockCall

    @property
    def key(self) -> Any:
        """A key that is equal for calls that take equally long."""
        bounds, offsets = self.call.cu_seqlens, self.offsets
        documents = None if bounds is None else (offsets, tuple(bounds.tolist()))
        return self.shapes, self.strides, offsets.left, offsets.right, self.variant, documents

    @property
    def flops(self) -> float:
        """Floating point operations of forward: of all pairs, or of half of them if queries do not see all keys. The
        blocks of all ranks then have as many as the whole rows of `Attention`."""
        (queries, batch, heads, width), (keys, *_), (*_, value_width) = self.shapes
        seen = 2.0 if (self.offsets.left, self.offsets.right) == (None, None) else 1.0
        return seen * queries * keys * batch * heads * (width + value_width)


@dataclass(frozen=True)
class Roofline:
    """An operation that is not timed: it takes the time of its FLOPs at the rate of the fastest product, or that of its
    bytes at the rate of a copy, whichever is longer."""

    part: str
    """Part of the floor."""
    name: str
    flops: float
    """Floating point operations of forward and backward."""
    moved: int
    """Bytes that forward and backward must move."""


class Recorder:
    """The operations that the first micro-batch runs on this rank. Packed documents differ between micro-batches, so
    attention is recorded in the first `attention_microbatches`.
    """

    def __init__(self, attention_microbatches: int = 1) -> None:
        self.products: Counter[Product] = Counter()
        self.attention: dict[Any, tuple[Attention | AttentionBlock, int]] = {}
        """A call of each kind, and the number of such calls in the recorded micro-batches."""
        self.moved: Counter[str] = Counter()
        """Bytes that the forward and backward of each memory-bound operation must move."""
        self.others: Counter[Roofline] = Counter()
        """Scores of indexers, and scans of state space layers."""
        self.attention_microbatches = attention_microbatches
        self._microbatch: int | None = None
        """Index of the current micro-batch; None between micro-batches."""
        self._begun = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context: the operations of models that are built inside are recorded."""
        kernels = backends.triton_backend()
        recorded = None if kernels is None else self.recording(kernels)
        choose, loss = sparse_latent_attention.unselected_keys, sparse_latent_attention.indexer_loss
        column, row = ProductsInPieces.column_parallel_linear, ProductsInPieces.row_parallel_linear
        with (
            mock.patch.object(backends, "LOCAL", self.recording(backends.LOCAL)),
            mock.patch.object(backends, "triton_backend", lambda: recorded),
            mock.patch.object(sparse_latent_attention, "unselected_keys", self._noting(_note_choice, choose)),
            mock.patch.object(sparse_latent_attention, "indexer_loss", self._noting(_note_indexer_loss, loss)),
            mock.patch.object(ProductsInPieces, "column_parallel_linear", self._noting(_note_column_pieces, column)),
            mock.patch.object(ProductsInPieces, "row_parallel_linear", self._noting(_note_row_pieces, row)),
        ):
            yield

    def recording(self, backend: Backend) -> Backend:
        """Returns the backend with operations that are recorded."""
        changed: dict[str, dict[str, Any]] = {}
        for name, record in backend.records().items():
            changed[name] = {**self._noted(vars(record)), "noting": self._noted(record.noting)}
        changed["attention"]["kernels"] = {
            asked: tuple(
                dataclasses.replace(kernel, compute=self._noting_attention(kernel.compute)) for kernel in kernels
            )
            for asked, kernels in backend.attention.kernels.items()
        }
        changed["attention"]["block_kernels"] = {
            asked: tuple(dataclasses.replace(kernel, forward=self._noting_block(kernel)) for kernel in kernels)
            for asked, kernels in backend.attention.block_kernels.items()
        }
        multiply = self._noting(_note_fp8_product, backend.fp8_kernels.product)
        grouped = backend.fp8_kernels.grouped
        grouped = dataclasses.replace(grouped, product=self._noting(_note_fp8_experts, grouped.product))
        fp8_kernels = dataclasses.replace(backend.fp8_kernels, product=multiply, grouped=grouped)
        return dataclasses.replace(backend.with_operations(**changed), fp8_kernels=fp8_kernels)

    def _noted(self, operations: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._noting(_NOTES[name], own) for name, own in operations.items() if name in _NOTES}

    def _noting(self, note: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            result = function(*args, **keywords)
            if self._microbatch == 0:
                note(self, result, *args, **keywords)
            return result

        return call

    def _noting_attention(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **keywords: Any) -> Tensor:
            if self._attends:
                _note_attention(self, compute, *args, **keywords)
            return compute(*args, **keywords)

        return call

    def _noting_block(self, kernel: BlockKernel) -> Callable[..., tuple[Tensor, Tensor]]:
        def forward(*args: Any) -> tuple[Tensor, Tensor]:
            if self._attends:
                _note_block(self, kernel, *args)
            return kernel.forward(*args)

        return forward

    @property
    def _attends(self) -> bool:
        """Whether attention is recorded now."""
        return self._microbatch is not None and self._microbatch < self.attention_microbatches

    def around(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward step, wrapped so that its first calls are recorded."""

        def recorded(data: Any, model: nn.Module) -> Any:
            self._microbatch, self._begun = self._begun, self._begun + 1
            try:
                return forward_step(data, model)
            finally:
                self._microbatch = None

        return recorded

    def flops(self) -> float:
        """Returns the floating point operations of forward and backward of the micro-batch."""
        found = sum(count * product.flops for product, count in self.products.items())
        attention = sum(count * call.flops for call, count in self.attention.values())
        others = sum(count * each.flops for each, count in self.others.items())
        return 3.0 * (found + attention / self.attention_microbatches) + others


# ---------------------------------------------------------------------------------------------------------------------
# Work of each operation


def _size(*tensors: Any) -> int:
    """Returns the bytes of tensors; None has none."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def _has_backward(output: Tensor) -> bool:
    """Whether backward follows an operation: not in an indexer that is not trained. Without gradients at all the
    operation is part of a function that has its own backward."""
    return output.requires_grad or not torch.is_grad_enabled()


def _note_product(seen: Recorder, inputs: Tensor, weight: Tensor, *, rows: int | None = None, **more: Any) -> None:
    outputs, width = weight.shape[-2:]
    count = inputs.numel() // width if rows is None else rows
    asked = inputs.requires_grad, weight.requires_grad
    seen.products[Product(count, width, outputs, inputs.dtype, backward=asked, **more)] += 1


def _note_linear(seen: Recorder, output: Tensor, inputs: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    _note_product(seen, inputs, weight, rows=output.numel() // weight.shape[0])


def _note_column_pieces(
    seen: Recorder, output: Tensor, _: Any, inputs: Tensor, weight: Tensor, *__: Any, **___: Any
) -> None:
    _note_linear(seen, output, inputs, weight)


def _note_row_pieces(seen: Recorder, output: Tensor, _: Any, inputs: Tensor, weight: Tensor) -> None:
    _note_product(seen, inputs, weight)  # of all ranks' tokens; the output has only those of this rank


def _note_grouped(seen: Recorder, output: Tensor, inputs: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    _note_product(seen, inputs, weight, rows=output.shape[0], experts=True)  # arriving rows have a placeholder


def _note_head(
    seen: Recorder, losses: Tensor, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, *_: Any, **__: Any
) -> None:
    _note_product(seen, hidden, weight, rows=labels.numel())
    seen.moved["cross entropy"] += 2 * labels.numel() * weight.shape[0] * hidden.element_size()


def _note_fp8_product(
    seen: Recorder, output: Tensor, left: Quantized, right: Quantized, dtype: torch.dtype, *_: Any, **__: Any
) -> None:
    rows, width = left.values.shape
    seen.products[Product(rows, width, right.values.shape[0], dtype, fp8=True)] += 1


def _note_fp8_experts(
    seen: Recorder, output: Tensor, left: Any, right: Any, segments: Any, dtype: torch.dtype, **_: Any
) -> None:
    rows, width = left.values.shape
    weights = segments.groups
    seen.products[Product(rows, width, output.shape[1], dtype, fp8=True, experts=True, weights=weights)] += 1


def _note_attention(
    seen: Recorder,
    compute: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: AttentionVariant,
    call: AttentionCall,
) -> None:
    mask, pairs = call.mask, None
    if mask is not None and mask.shape[-2] > 1:

        def hidden(first: int, rows: int) -> Tensor:
            found = hidden_keys(variant, call, first, rows, query.shape[0], key.shape[0], query.device)
            assert found is not None
            return found[:, 0] if found.dim() == 4 else found

        pairs = _pairs_seen(hidden, query, key)
        call = dataclasses.replace(call, mask=None)  # it is large
    _count_attention(seen, Attention(compute, *_forms(query, key, value), query.dtype, variant, call, pairs))


def _pairs_seen(hidden: HiddenKeys, query: Tensor, key: Tensor) -> int:
    """Returns the number of pairs of a query [sq, b, ...] and a key [sk, b, ...] that are not hidden."""
    length, batch = query.shape[:2]
    found = 0
    for first in range(0, length, _QUERIES_AT_ONCE):
        rows = min(_QUERIES_AT_ONCE, length - first)
        found += int((~hidden(first, rows)).expand(batch, rows, key.shape[0]).sum())
    return found


def _note_block(
    seen: Recorder,
    kernel: BlockKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: BlockOffsets,
    variant: AttentionVariant,
    call: BlockCall,
) -> None:
    _count_attention(seen, AttentionBlock(kernel, *_forms(query, key, value), query.dtype, offsets, variant, call))


def _forms(*tensors: Tensor) -> tuple[tuple[torch.Size, ...], tuple[tuple[int, ...], ...]]:
    return tuple(tensor.shape for tensor in tensors), tuple(tensor.stride() for tensor in tensors)


def _count_attention(seen: Recorder, found: Attention | AttentionBlock) -> None:
    first, count = seen.attention.get(found.key, (found, 0))
    seen.attention[found.key] = first, count + 1


def _note_choice(
    seen: Recorder, left_out: Tensor, query: Tensor, key: Tensor, weight: Tensor, hidden: HiddenKeys, *_: Any
) -> None:
    # Scores are in float32, and chosen keys are places in int32. Only a loss has gradients of scores.
    pairs, chosen, (heads, width) = _pairs_seen(hidden, query, key), int((~left_out).sum()), query.shape[2:]
    name = f"scores of an indexer: {pairs} pairs, {heads} heads, {width} channels"
    flops, moved = 2.0 * pairs * heads * width, _size(query, key, weight) + 4 * pairs
    seen.others[Roofline("attention", name, flops, moved)] += 1
    seen.moved["choice of keys"] += 4 * (pairs + chosen)


def _note_indexer_loss(
    seen: Recorder,
    loss: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    attention: tuple[Tensor, Tensor, float],
    hidden: HiddenKeys,
    *_: Any,
) -> None:
    # The scores of attention in forward, and the gradients of the indexer's queries and keys.
    (query, key, weight), (attending, attended, _scale) = index, attention
    channels, attending_channels = query[0, 0].numel(), attending[0, 0].numel()
    pairs = _pairs_seen(hidden, query, key)
    flops = 2.0 * pairs * (attending_channels + 2 * channels)
    moved = 2 * _size(query, key, weight) + _size(attending, attended)
    seen.others[Roofline("attention", f"loss of an indexer: {pairs} pairs", flops, moved)] += 1


def _note_norm(seen: Recorder, output: Any, inputs: Tensor, *_: Any, **__: Any) -> None:
    output = output[0] if isinstance(output, tuple) else output
    # Backward reads the input and the output's gradient.
    backward = 2 * _size(inputs) + _size(output) if _has_backward(output) else 0
    seen.moved["norms"] += _size(inputs, output) + backward


def _note_residual(
    seen: Recorder, output: Tensor, inputs: Tensor, bias: Any, residual: Any, probability: float, *_: Any, **__: Any
) -> None:
    # Backward reads the residual's gradient once more; a bias's gradient is a sum over the rows.
    backward = _size(residual) + (_size(output) if bias is not None else 0) + (2 * _size(inputs) if probability else 0)
    if residual is not None or bias is not None or probability:
        seen.moved["residuals"] += _size(inputs, residual, output) + backward


def _note_shared(
    seen: Recorder, output: Tensor, routed: Tensor, _: Any, gate_logits: Any = None, residual: Any = None
) -> None:
    if residual is not None:
        _note_residual(seen, output, routed, None, residual, 0.0)


def _note_activation(seen: Recorder, output: Tensor, inputs: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["activations"] += 3 * _size(inputs) + 2 * _size(output)


def _note_rope(seen: Recorder, output: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["rotary positions"] += (4 if _has_backward(output) else 2) * _size(output)


def _note_embedding(seen: Recorder, output: Tensor, *_: Any, **__: Any) -> None:
    # Backward adds the rows to a float32 gradient.
    seen.moved["embedding"] += 3 * _size(output) + 2 * 4 * output.numel()


def _note_rows(seen: Recorder, output: Tensor, rows: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["permutation"] += 2 * _size(output, rows)


def _note_cross_entropy(seen: Recorder, losses: Tensor, logits: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["cross entropy"] += 2 * _size(logits)


def _note_convolution(seen: Recorder, output: Tensor, inputs: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["convolutions"] += 3 * _size(inputs) + 2 * _size(output)


def _note_gated_norm(seen: Recorder, output: Tensor, inputs: Tensor, gate: Tensor, *_: Any, **__: Any) -> None:
    seen.moved["gates and norms"] += 3 * _size(inputs, gate) + 2 * _size(output)


def _note_mamba_scan(
    seen: Recorder, output: Tensor, mixed: Tensor, step: Tensor, *_: Any, state_dim: int, **__: Any
) -> None:
    _note_scan(seen, "mamba", output, state_dim, mixed, step)


def _note_delta_rule(
    seen: Recorder,
    output: Tensor,
    mixed: Tensor,
    fading: Tensor,
    strength: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    widths: tuple[int, int],
    *_: Any,
) -> None:
    _note_scan(seen, "gated_delta_net", output, widths[0], mixed, fading, strength)


def _note_scan(seen: Recorder, kind: str, output: Tensor, state_dim: int, *inputs: Tensor) -> None:
    """Counts the products with states, which chunks of any length need. Those within chunks are left out: the shorter
    the chunks, the fewer they are. States that are passed between chunks can stay on the GPU's multiprocessors."""
    states = output.numel() * state_dim
    name = f"scan of {kind}: {states} numbers of states"
    flops, moved = 3 * 2.0 * STATE_PRODUCTS[kind] * states, 3 * _size(*inputs) + 2 * _size(output)
    seen.others[Roofline("state space", name, flops, moved)] += 1


_NOTES: dict[str, Callable[..., None]] = {
    "linear": _note_linear,
    "grouped_linear": _note_grouped,
    "head_loss": _note_head,
    "rms_norm": _note_norm,
    "layer_norm": _note_norm,
    "rms_norm_with_residual": _note_norm,
    "layer_norm_with_residual": _note_norm,
    "bias_dropout_add": _note_residual,
    "add_shared": _note_shared,
    "weighted_activation": _note_activation,
    "apply_rope": _note_rope,
    "embedding": _note_embedding,
    "permute": _note_rows,
    "unpermute": _note_rows,
    "cross_entropy": _note_cross_entropy,
    "causal_conv": _note_convolution,
    "gated_rms_norm": _note_gated_norm,
    "mamba_scan": _note_mamba_scan,
    "delta_rule_attention": _note_delta_rule,
}
"""For each recorded operation of a backend: a function of (recorder, result, arguments of the call)."""
