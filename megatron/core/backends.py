"""The implementation of each operation that a layer uses.

A backend is a frozen record of functions. A layer calls `choose_backend` once, when it is built; its forward only calls
the functions of the record. An operation that has a kernel for one kind of device only is a `ByDevice`, so a model can
be built on one device and moved to another.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.attention.blocks import merge_block
from megatron.core.ops.attention.flash3 import find_flash3
from megatron.core.ops.attention.kernels import (
    BLOCK_CANDIDATES,
    CANDIDATES,
    AttentionKernel,
    BlockKernel,
    before_unfused,
    own_flash_kernels,
    with_flash3,
    with_own_flash,
)
from megatron.core.ops.attention.max_logits import max_attention_logits
from megatron.core.ops.causal_conv import causal_conv
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.ops.delta_rule.attention import delta_rule_attention
from megatron.core.ops.dropout.dropout import bias_dropout_add, keep_rows
from megatron.core.ops.dropout.dropout_cpu import keep_rows_compiled
from megatron.core.ops.embedding import embedding
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.grouped import (
    GroupedKernels,
    QuantizedGroups,
    accumulate_product_of_groups,
    cast_segments,
    largest_of_segments,
    product_of_groups,
    quantize_segment_blocks,
    quantize_segments_by_largest,
)
from megatron.core.ops.fp8.grouped_linear import Fp8ExpertLinear, Fp8GroupedLinear
from megatron.core.ops.fp8.grouped_recipes import MicroBatches
from megatron.core.ops.fp8.linear import Fp8Linear
from megatron.core.ops.fp8.product import (
    accumulate_product,
    accumulate_product_cuda,
    emulated_product,
    product_cuda,
)
from megatron.core.ops.fp8.quantize import (
    Quantized,
    cast_scaled,
    largest_value,
    quantize_blocks,
    quantize_by_largest,
)
from megatron.core.ops.fp8.recipes import Fp8Kernels, Fp8Settings, LinearSplit
from megatron.core.ops.fp8.weight_blocks import WeightKernels, cast_blocks, largest_of_blocks, transposed_codes
from megatron.core.ops.gated_norm import gated_rms_norm
from megatron.core.ops.head_loss import head_loss
from megatron.core.ops.linear import linear, sum_rows
from megatron.core.ops.moe.grouped_linear import accumulate_grouped_product, grouped_bias, grouped_linear
from megatron.core.ops.moe.permute import ChoiceNumbers, permute, unpermute
from megatron.core.ops.moe.routing import balance_sums, best, choose_experts, count_experts
from megatron.core.ops.moe.weighted_activation import weighted_activation
from megatron.core.ops.norm import layer_norm, layer_norm_with_residual, rms_norm, rms_norm_with_residual
from megatron.core.ops.normed_rope import normed_rope
from megatron.core.ops.rope import apply_rope
from megatron.core.ops.split_columns import split_columns
from megatron.core.ops.split_heads import split_heads, split_rotated_heads
from megatron.core.ops.ssd.scan import mamba_scan
from megatron.core.ops.transformer_engine.attention import with_engine_attention
from megatron.core.ops.transformer_engine.engine import (
    Engine,
    find_engine,
    recipe_of,
    unused_line,
    why_layers_stay_ours,
)
from megatron.core.ops.transformer_engine.linear import make_grouped_linear, make_linear
from megatron.core.ops.transformer_engine.norm import EngineNorms
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils.warn import warn_on_first_rank


@dataclass(frozen=True)
class Backend:
    """Implementations of operations. Each has the signature and meaning of the function of its name in
    `megatron.core.ops`."""

    name: str
    linear: Callable[..., Tensor] = linear
    embedding: Callable[..., Tensor] = embedding
    layer_norm: Callable[..., Tensor] = layer_norm
    rms_norm: Callable[..., Tensor] = rms_norm
    layer_norm_with_residual: Callable[..., tuple[Tensor, Tensor]] = layer_norm_with_residual
    rms_norm_with_residual: Callable[..., tuple[Tensor, Tensor]] = rms_norm_with_residual
    apply_rope: Callable[..., Tensor] = apply_rope
    split_heads: Callable[..., tuple[Tensor, ...]] = split_heads
    split_rotated_heads: Callable[..., tuple[Tensor, ...]] | None = None
    """`split_heads` and `apply_rope` as one operation; None: they are two."""
    normed_rope: Callable[..., Tensor] | None = None
    """`rms_norm` of heads and `apply_rope` as one operation; None: they are two."""
    keep_rows: Callable[..., Tensor] = keep_rows
    bias_dropout_add: Callable[..., Tensor] = bias_dropout_add
    causal_conv: Callable[..., Tensor] = causal_conv
    gated_rms_norm: Callable[..., Tensor] = gated_rms_norm
    delta_rule_attention: Callable[..., Tensor] = delta_rule_attention
    split_columns: Callable[..., tuple[Tensor, ...]] = split_columns
    mamba_scan: Callable[..., Tensor] = mamba_scan
    merge_block: Callable[..., None] = merge_block
    max_attention_logits: Callable[..., Tensor] = max_attention_logits
    cross_entropy: Callable[..., Tensor] = cross_entropy
    head_loss: Callable[..., Tensor] = head_loss
    grouped_linear: Callable[..., Tensor] = grouped_linear
    grouped_bias: Callable[..., Tensor] = grouped_bias
    best: Callable[[Tensor, int], Tensor] = best
    choose_experts: Callable[..., tuple[Tensor, Tensor]] = choose_experts
    count_experts: Callable[..., Tensor] = count_experts
    balance_sums: Callable[..., Tensor] = balance_sums
    number_choices: Callable[[Tensor, int], ChoiceNumbers] = ChoiceNumbers
    permute: Callable[..., Tensor] = permute
    unpermute: Callable[..., Tensor] = unpermute
    weighted_activation: Callable[..., Tensor] = weighted_activation
    attention: Mapping[AttnBackend, tuple[AttentionKernel, ...]] = field(default_factory=lambda: CANDIDATES)
    """Attention kernels for each value of `attention_backend`, in order of preference. A layer uses the first kernel
    that supports it."""
    attention_blocks: Mapping[AttnBackend, tuple[BlockKernel, ...]] = field(default_factory=lambda: BLOCK_CANDIDATES)
    """Attention kernels for rows that are split over ranks, in order of preference."""
    sum_rows: Callable[[Tensor], Tensor] = sum_rows
    fp8_kernels: Fp8Kernels = field(default_factory=Fp8Kernels)
    fp8: Fp8Settings | None = None
    """Settings with which the linear layers of `make_linear` multiply in fp8; None: not in fp8."""
    engine: Engine | None = None
    """Transformer Engine, if it computes grouped experts and linear layers that own their weight; else None."""
    tokens_group: Group = None
    """The ranks that divide the tokens of a micro-batch before they reach a layer (context parallelism)."""

    def make_linear(self, split: LinearSplit, weight: Tensor | None) -> Callable[..., Tensor]:
        """Returns the function that computes one linear layer: `linear`, or with fp8 an object that keeps the layer's
        scales and its quantised weight. `weight` [out, in] gives sizes and device; None: the layer does not own a
        weight."""
        if self.engine is not None and weight is not None and weight.dtype in self.engine.dtypes:
            made: Callable[..., Tensor] = make_linear(self.engine, self.fp8, weight)
            return made
        if self.fp8 is None or weight is None:
            return self.linear
        split = dataclasses.replace(split, tokens=(*split.tokens, self.tokens_group))
        return Fp8Linear(self.fp8, split, weight, self.sum_rows)

    def make_grouped_linear(
        self, split: LinearSplit, weight: Tensor, micro_batches: MicroBatches
    ) -> Callable[..., Tensor]:
        """Returns the function that computes one linear layer of all experts of a rank, as `make_linear` does for other
        layers."""
        if self.engine is not None and weight.dtype in self.engine.dtypes:
            made: Callable[..., Tensor] = make_grouped_linear(self.engine, self.fp8, weight)
            return made
        if self.fp8 is None:
            return self.grouped_linear
        return Fp8GroupedLinear(self.fp8, split, weight, micro_batches)

    def make_expert_linears(
        self, split: LinearSplit, weights: Sequence[Tensor], micro_batches: MicroBatches
    ) -> list[Fp8ExpertLinear]:
        """Returns a function that computes a linear layer in fp8 for each expert of a rank; an empty list without
        fp8."""
        if self.fp8 is None or not weights:
            return []
        first = Fp8ExpertLinear(self.fp8, split, weights[0], micro_batches)
        return [first, *(Fp8ExpertLinear(self.fp8, split, own, scaling=first.scaling) for own in weights[1:])]

    def describe(self, device_type: str) -> str:
        """Returns one line for the log: the backend, and its operations that are not plain torch on a kind of
        device."""
        if self.engine is not None:
            fp8 = "" if self.fp8 is None else f" in fp8 by its recipe {recipe_of(self.engine, self.fp8)}"
            if self.fp8 is not None and self.fp8.recipe == "delayed":
                fp8 += " (its history is not in checkpoints and starts anew)"
            return f"backend {self.name} {self.engine.version}: its linear layers{fp8}, {_OF_ENGINE}"
        own = []
        for entry in dataclasses.fields(self):
            function = getattr(self, entry.name)
            function = getattr(function, device_type, function)
            if entry.name not in _NOT_LISTED and function is not entry.default:
                own.append(entry.name)
        subjects = list(dict.fromkeys(_SUBJECTS.get(name, name) for name in own))
        if len(subjects) > 3:
            return f"backend {self.name}: its own kernels for {', '.join(subjects)}; plain torch for the rest"
        return f"backend {self.name}: plain torch" + (f" except {', '.join(subjects)}" if own else "")


_NOT_LISTED = (
    *("name", "attention", "attention_blocks", "split_rotated_heads", "normed_rope"),
    *("split_columns", "sum_rows", "fp8_kernels", "fp8", "engine", "tokens_group"),
)
"""Fields of a backend that its line in the log leaves out."""

_SUBJECTS = {
    **dict.fromkeys(("layer_norm", "rms_norm", "layer_norm_with_residual", "rms_norm_with_residual"), "norms"),
    **dict.fromkeys(("cross_entropy", "head_loss"), "losses"),
    **dict.fromkeys(("best", "choose_experts", "count_experts", "balance_sums", "number_choices"), "experts"),
    **dict.fromkeys(("grouped_linear", "grouped_bias", "permute", "unpermute"), "experts"),
    "embedding": "embeddings",
    **dict.fromkeys(("split_heads", "merge_block", "max_attention_logits"), "attention"),
    "linear": "biases",
    "apply_rope": "rotary positions",
    "keep_rows": "dropout masks",
    "bias_dropout_add": "dropout",
    "weighted_activation": "activations",
    "delta_rule_attention": "gated delta nets",
    "causal_conv": "convolutions",
    "mamba_scan": "state spaces",
    "gated_rms_norm": "norms",
}
"""Names of operations in the log; operations that are not listed keep their field's name."""

_OF_ENGINE = (
    "norms, attention and grouped experts; ours: head and loss, rotary positions, activations, "
    "dropout, routing, experts one by one, attention under context parallelism, the optimizer (one kernel for all)"
)
"""The log's text about the operations that Transformer Engine computes, and those that our code computes."""


@dataclass(frozen=True)
class ByDevice:
    """An operation with one implementation for GPUs and one for other devices. The first tensor argument decides."""

    cpu: Callable[..., Any]
    cuda: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the implementation for the device of the first tensor argument."""
        first = next(argument for argument in args if isinstance(argument, Tensor))
        return self.chosen_for(first)(*args, **kwargs)

    def chosen_for(self, tensor: Tensor) -> Callable[..., Any]:
        """Returns the implementation for the device of a tensor."""
        return self.cuda if tensor.is_cuda else self.cpu


LOCAL = Backend("local", keep_rows=ByDevice(cpu=keep_rows_compiled, cuda=keep_rows))
"""Plain torch on any device, with numba for random masks on a CPU."""


@functools.cache
def triton_backend() -> Backend | None:
    """Returns the backend with our own GPU kernels, or None if Triton cannot be imported."""
    try:
        from megatron.core.ops.attention.flash_triton import (
            flash_attention_triton,
            flash_block_attention_backward_triton,
            flash_block_attention_triton,
            has_specialized_warps,
        )
        from megatron.core.ops.attention.max_logits_triton import max_attention_logits_triton
        from megatron.core.ops.attention.merge_triton import merge_block_triton
        from megatron.core.ops.causal_conv_triton import causal_conv_triton
        from megatron.core.ops.cross_entropy_triton import cross_entropy_triton
        from megatron.core.ops.delta_rule.attention_triton import delta_rule_attention_triton
        from megatron.core.ops.dropout.dropout_triton import bias_dropout_add_triton, keep_rows_triton
        from megatron.core.ops.embedding_triton import accumulate_rows_triton
        from megatron.core.ops.fp8.grouped_product_triton import (
            accumulate_product_of_groups_triton,
            product_of_groups_triton,
        )
        from megatron.core.ops.fp8.grouped_quantize_triton import (
            cast_segments_triton,
            largest_of_segments_triton,
            quantize_segment_blocks_triton,
            quantize_segments_by_largest_triton,
        )
        from megatron.core.ops.fp8.quantize_triton import (
            cast_scaled_triton,
            largest_value_triton,
            quantize_blocks_triton,
            quantize_by_largest_triton,
        )
        from megatron.core.ops.fp8.weight_blocks_triton import (
            cast_blocks_triton,
            largest_of_blocks_triton,
            transposed_codes_triton,
        )
        from megatron.core.ops.gated_norm_triton import gated_rms_norm_triton
        from megatron.core.ops.moe.grouped_linear_triton import (
            accumulate_grouped_product_triton,
            grouped_bias_cuda,
            grouped_linear_cuda,
        )
        from megatron.core.ops.moe.permute_triton import (
            ChoiceNumbersTriton,
            permute_triton,
            unpermute_triton,
        )
        from megatron.core.ops.moe.routing_triton import (
            balance_sums_triton,
            best_triton,
            choose_experts_triton,
            count_experts_triton,
        )
        from megatron.core.ops.moe.weighted_activation_triton import weighted_activation_triton
        from megatron.core.ops.norm_triton import (
            layer_norm_triton,
            layer_norm_with_residual_triton,
            rms_norm_triton,
            rms_norm_with_residual_triton,
        )
        from megatron.core.ops.normed_rope_triton import normed_rope_triton
        from megatron.core.ops.rope_triton import apply_rope_triton
        from megatron.core.ops.split_columns_triton import split_columns_triton
        from megatron.core.ops.split_heads_triton import (
            split_heads_triton,
            split_rotated_heads_triton,
        )
        from megatron.core.ops.ssd.scan_triton import mamba_scan_triton
        from megatron.core.ops.sum_rows_triton import sum_rows_triton
    except ImportError:
        return None

    def product_of_groups_cuda(rows: QuantizedGroups, *args: Any, **kwargs: Any) -> Tensor:
        return (product_of_groups_triton if rows.values.is_cuda else product_of_groups)(rows, *args, **kwargs)

    grouped = GroupedKernels(
        accumulate_rows=ByDevice(accumulate_grouped_product, accumulate_grouped_product_triton),
        largest=ByDevice(cpu=largest_of_segments, cuda=largest_of_segments_triton),
        cast=ByDevice(cpu=cast_segments, cuda=cast_segments_triton),
        quantize_blocks=ByDevice(cpu=quantize_segment_blocks, cuda=quantize_segment_blocks_triton),
        quantize_by_largest=ByDevice(cpu=quantize_segments_by_largest, cuda=quantize_segments_by_largest_triton),
        product=product_of_groups_cuda,
        accumulate=ByDevice(cpu=accumulate_product_of_groups, cuda=accumulate_product_of_groups_triton),
    )
    whole_rows, blocks = own_flash_kernels(
        flash_attention_triton, flash_block_attention_triton, flash_block_attention_backward_triton
    )
    return dataclasses.replace(
        LOCAL,
        name="triton",
        attention=with_own_flash(CANDIDATES, whole_rows, has_specialized_warps),
        attention_blocks=before_unfused(BLOCK_CANDIDATES, blocks),
        linear=ByDevice(cpu=linear, cuda=functools.partial(linear, sum_rows=sum_rows_triton)),
        layer_norm=ByDevice(cpu=layer_norm, cuda=layer_norm_triton),
        rms_norm=ByDevice(cpu=rms_norm, cuda=rms_norm_triton),
        layer_norm_with_residual=ByDevice(cpu=layer_norm_with_residual, cuda=layer_norm_with_residual_triton),
        rms_norm_with_residual=ByDevice(cpu=rms_norm_with_residual, cuda=rms_norm_with_residual_triton),
        apply_rope=ByDevice(cpu=apply_rope, cuda=apply_rope_triton),
        split_columns=ByDevice(cpu=split_columns, cuda=split_columns_triton),
        split_heads=ByDevice(cpu=split_heads, cuda=split_heads_triton),
        split_rotated_heads=ByDevice(cpu=split_rotated_heads, cuda=split_rotated_heads_triton),
        normed_rope=ByDevice(cpu=normed_rope, cuda=normed_rope_triton),
        embedding=ByDevice(cpu=embedding, cuda=functools.partial(embedding, accumulate_rows=accumulate_rows_triton)),
        best=ByDevice(cpu=best, cuda=best_triton),
        choose_experts=ByDevice(cpu=choose_experts, cuda=choose_experts_triton),
        count_experts=ByDevice(cpu=count_experts, cuda=count_experts_triton),
        balance_sums=ByDevice(cpu=balance_sums, cuda=balance_sums_triton),
        keep_rows=ByDevice(cpu=keep_rows_compiled, cuda=keep_rows_triton),
        bias_dropout_add=ByDevice(cpu=bias_dropout_add, cuda=bias_dropout_add_triton),
        causal_conv=ByDevice(cpu=causal_conv, cuda=causal_conv_triton),
        gated_rms_norm=ByDevice(cpu=gated_rms_norm, cuda=gated_rms_norm_triton),
        delta_rule_attention=ByDevice(cpu=delta_rule_attention, cuda=delta_rule_attention_triton),
        mamba_scan=ByDevice(cpu=mamba_scan, cuda=mamba_scan_triton),
        merge_block=ByDevice(cpu=merge_block, cuda=merge_block_triton),
        max_attention_logits=ByDevice(cpu=max_attention_logits, cuda=max_attention_logits_triton),
        cross_entropy=ByDevice(cpu=cross_entropy, cuda=cross_entropy_triton),
        head_loss=ByDevice(cpu=head_loss, cuda=functools.partial(head_loss, loss=cross_entropy_triton)),
        grouped_linear=ByDevice(cpu=grouped_linear, cuda=grouped_linear_cuda),
        grouped_bias=ByDevice(cpu=grouped_bias, cuda=grouped_bias_cuda),
        number_choices=ByDevice(cpu=ChoiceNumbers, cuda=ChoiceNumbersTriton),
        permute=ByDevice(cpu=permute, cuda=permute_triton),
        unpermute=ByDevice(cpu=unpermute, cuda=unpermute_triton),
        weighted_activation=ByDevice(cpu=weighted_activation, cuda=weighted_activation_triton),
        sum_rows=ByDevice(cpu=sum_rows, cuda=sum_rows_triton),
        fp8_kernels=Fp8Kernels(
            ByDevice(cpu=largest_value, cuda=largest_value_triton),
            ByDevice(cpu=cast_scaled, cuda=cast_scaled_triton),
            ByDevice(cpu=quantize_blocks, cuda=quantize_blocks_triton),
            ByDevice(cpu=quantize_by_largest, cuda=quantize_by_largest_triton),
            _scaled_product,
            ByDevice(cpu=accumulate_product, cuda=accumulate_product_cuda),
            {
                name: ByDevice(cpu=reference, cuda=functools.partial(kernel, notes_largest=True))
                for name, reference, kernel in (
                    ("weighted_activation", weighted_activation, weighted_activation_triton),
                    ("layer_norm_with_residual", layer_norm_with_residual, layer_norm_with_residual_triton),
                    ("rms_norm_with_residual", rms_norm_with_residual, rms_norm_with_residual_triton),
                    ("permute", permute, permute_triton),
                    ("unpermute", unpermute, unpermute_triton),
                )
            },
            grouped,
            WeightKernels(
                ByDevice(cpu=largest_of_blocks, cuda=largest_of_blocks_triton),
                ByDevice(cpu=cast_blocks, cuda=cast_blocks_triton),
                ByDevice(cpu=transposed_codes, cuda=transposed_codes_triton),
            ),
        ),
    )


def _scaled_product(left: Quantized, right: Quantized, dtype: torch.dtype, precise: bool = True) -> Tensor:
    return (product_cuda if left.values.is_cuda else emulated_product)(left, right, dtype, precise)


def engine_backend(engine: Engine) -> Backend:
    """Returns the backend whose linear layers, norms, attention and grouped experts are Transformer Engine's. Other
    operations are those of the Triton backend on a GPU."""
    base = (triton_backend() if torch.cuda.is_available() else None) or LOCAL
    norms = EngineNorms(engine, base.layer_norm, base.rms_norm)
    return dataclasses.replace(
        base,
        name="transformer_engine",
        engine=engine,
        attention=with_engine_attention(engine, base.attention),
        layer_norm=norms.layer_norm,
        rms_norm=norms.rms_norm,
        normed_rope=None,
        layer_norm_with_residual=norms.layer_norm_with_residual,
        rms_norm_with_residual=norms.rms_norm_with_residual,
        grouped_linear=grouped_linear,  # Transformer Engine needs the numbers of rows on the host, like the plain loop
        fp8_kernels=dataclasses.replace(base.fp8_kernels, noting={}),
    )


_engine_backend = functools.cache(engine_backend)


def choose_backend(config: ModelParallelConfig) -> Backend:
    """Returns the backend of `config.transformer_impl`. transformer_engine: Transformer Engine's backend, if it can be
    used and `why_layers_stay_ours` returns no reason against it; otherwise a warning says why it is not used. local, or
    no GPU or no Triton: LOCAL. Otherwise: the Triton backend. With `attention_backend` flash, FlashAttention-3 comes
    first where it is installed.

    Raises UserError if the config asks for Triton and it cannot be imported."""
    backend = _asked_backend(config)
    flash3 = find_flash3() if getattr(config, "attention_backend", None) is AttnBackend.flash else None
    if flash3 is not None:
        return dataclasses.replace(backend, attention=with_flash3(backend.attention, flash3))
    return backend


def _asked_backend(config: ModelParallelConfig) -> Backend:
    asked = getattr(config, "transformer_impl", "auto")
    if asked == "transformer_engine":
        engine = find_engine()
        reason = engine if isinstance(engine, str) else why_layers_stay_ours(config)
        if isinstance(engine, Engine) and reason is None:
            return _engine_backend(engine)
        warn_on_first_rank(unused_line(reason or ""))
    if asked == "triton":
        backend = triton_backend()
        if backend is None:
            raise UserError(
                "--transformer-impl triton: Triton cannot be imported; install it, or use --transformer-impl auto, "
                "which then computes with plain torch"
            )
        return backend
    if asked == "local" or not torch.cuda.is_available():
        return LOCAL
    return triton_backend() or LOCAL


def backend_of_layer(
    backend: Backend, config: ModelParallelConfig, layer_number: int, groups: ProcessGroupCollection
) -> Backend:
    """Returns the backend of a transformer layer, counted from 1 over the whole model: with linear layers in fp8 if the
    config asks for them in this layer."""
    settings = fp8_settings(config, layer_number, backend.fp8_kernels)
    if settings is None:
        return backend
    tokens_group = groups.cp if groups.size("cp") > 1 else None
    noting: Mapping[str, Any] = settings.kernels.noting if settings.recipe == "tensorwise" else {}
    return dataclasses.replace(backend, fp8=settings, tokens_group=tokens_group, **noting)


def fp8_settings(config: Any, layer_number: int, kernels: Fp8Kernels) -> Fp8Settings | None:
    """Returns the fp8 settings of a layer; None if its products are not in fp8."""
    name = getattr(config, "fp8", None)
    if name is None:
        return None
    if config.first_last_layers_bf16:
        last = config.num_layers - config.num_layers_at_end_in_bf16
        if layer_number <= config.num_layers_at_start_in_bf16 or layer_number > last:
            return None
    return Fp8Settings(
        recipe=config.fp8_recipe,
        formats=FORMATS[name],
        margin=config.fp8_margin,
        history_len=config.fp8_amax_history_len,
        amax_algo=config.fp8_amax_compute_algo,
        wgrad=config.fp8_wgrad,
        keeps_weights=config.fp8_weight_cache,
        kernels=kernels,
    )
