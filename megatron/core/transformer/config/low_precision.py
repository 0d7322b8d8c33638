"""Matrix products in fp8 and fp4."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.core.declarations.config_fields import flag, not_a_flag, not_yet, too_small
from megatron.core.transformer.layer_patterns import has_heads

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(kw_only=True)
class LowPrecisionConfig:
    """Formats and scales of matrix products in eight or four bits."""

    fp8: Literal["e4m3", "hybrid"] | None = flag(None, on="--fp8-format")
    """Matrix products of linear layers and experts in fp8: e4m3 throughout, or e5m2 for output gradients (hybrid).
    Attention, embedding, head, routers and norms keep the model's type. A CPU emulates fp8."""

    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] | None = flag(
        "delayed", only_with="fp8"
    )
    """With --fp8-format: the values that share a scale. tensorwise: the whole tensor of a micro-batch. delayed: the
    whole tensor, with the scale of earlier steps. blockwise: blocks of 128 elements, and of 128 x 128
    weights; mxfp8: blocks of 32, emulated. The results of these two depend on the layout if it cuts tokens or weights
    between multiples of 128, or of 32."""

    fp8_param: bool = not_a_flag(False)
    """Has no effect: `DistributedDataParallelConfig.fp8_param_gather` keeps weights in fp8."""

    fp8_quantizer_factory: str | None = not_yet(None)
    """With --fp8-recipe custom: function that creates the quantizers."""

    fp8_margin: int = flag(0, only_with="fp8")
    """With --fp8-format: margin of the scales below the largest value, as a power of two."""

    fp8_interval: int = flag(1, no_effect="scales are computed at every step")
    """Used by older releases: steps between updates of the scales."""

    fp8_amax_history_len: int = flag(1, only_with="fp8_recipe=delayed")
    """With --fp8-recipe delayed: number of steps whose largest values are kept."""

    fp8_amax_compute_algo: Literal["most_recent", "max"] = flag("most_recent", only_with="fp8_recipe=delayed")
    """With --fp8-recipe delayed: which of the kept values determines the scale."""

    fp8_wgrad: bool = flag(
        True,
        off="--disable-fp8-wgrad",
        off_help="With --fp8-format: compute weight gradients in the model's type.",
        aliases=["--no-fp8-wgrad"],
        only_with="fp8",
    )
    """With --fp8-format: compute weight gradients in fp8 too."""

    fp8_weight_cache: bool = flag(
        True,
        off="--no-fp8-weight-cache",
        off_help="With --fp8-format: quantise weights again for each product: 2 bytes less per weight, equal results.",
        only_with="fp8",
        or_with="fp4",
    )
    """With --fp8-format: keep quantised weights, 2 bytes per weight, until the weights change. Without it each product
    quantises them again, with the same result."""

    fp8_dot_product_attention: bool = not_a_flag(False)
    """Compute attention's products in fp8."""

    fp8_multi_head_attention: bool = not_a_flag(False)
    """Keep attention's inputs and outputs in fp8."""

    tp_only_amax_red: bool = not_a_flag(False)
    """Reduce largest values over tensor parallel ranks only."""

    first_last_layers_bf16: bool = flag(False, only_with="fp8", or_with="fp4")
    """With --fp8-format or --fp4-format: keep the first and last layers in bfloat16."""

    num_layers_at_start_in_bf16: int = flag(1, only_with="first_last_layers_bf16")
    """With --first-last-layers-bf16: number of first layers."""

    num_layers_at_end_in_bf16: int = flag(1, only_with="first_last_layers_bf16")
    """With --first-last-layers-bf16: number of last layers."""

    fp4: Literal["e2m1"] | None = flag(None, on="--fp4-format")
    """Matrix products of the layers of --fp8-format in fp4 instead: a number has 4 bits, of which 2 are the exponent's
    and 1 the mantissa's. Emulated on a CPU; refused on GPUs before Blackwell."""

    fp4_recipe: Literal["nvfp4", "custom"] | None = flag("nvfp4", only_with="fp4")
    """With --fp4-format: the values that share a scale. nvfp4: blocks of 16 elements, 16 x 16 weights, and a second
    scale for the whole tensor of a micro-batch; its result depends on the layout if that cuts tokens between multiples
    of 16."""

    fp4_param: bool = flag(
        False, on="--fp4-param-gather", no_effect="weights are gathered in the model's type; results are the same"
    )
    """With --fp4-format: keep and gather weights in fp4."""

    fp4_quantizer_factory: str | None = not_yet(None, only_with="fp4")
    """With --fp4-recipe custom: function that creates the quantizers."""

    disable_parameter_transpose_cache: bool = not_a_flag(False)
    """Recompute transposed fp8 weights each time instead of caching them."""

    quant_recipe: object = not_a_flag(None)
    """Quantization formats by layer."""


_NEAREST = "{fp8_recipe:name} blockwise is the nearest that works"
_UNSUPPORTED = {
    "fp8_recipe": f"{{fp8_recipe}}: it builds quantizers of Transformer Engine, which is not used; {_NEAREST}",
    "fp4_recipe": "{fp4_recipe}: it builds quantizers of Transformer Engine, which is not used; nvfp4 works",
}
"""Recipes of the value custom."""


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each value, or pair of values, that fp8 or fp4 does not support; `config` has the fields of
    TransformerConfig."""
    if config.fp8 is None and config.fp4 is None:
        return
    if config.fp8 is not None and config.fp4 is not None:
        yield "{fp8} and {fp4} are set together; choose one"
    name = "fp8" if config.fp8 is not None else "fp4"
    recipe = f"{name}_recipe"
    if getattr(config, recipe) == "custom":
        yield _UNSUPPORTED[recipe]
    yield from too_small(config, ("fp8_amax_history_len",), 1)
    yield from too_small(config, ("fp8_margin", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), 0)
    groups = config.num_query_groups or config.num_attention_heads
    shared = groups is not None and groups < config.tensor_model_parallel_size and not config.multi_latent_attention
    if shared and has_heads(config):
        yield (
            f"{{{name}}} with {{num_query_groups:name}} "
            f"{groups} and {{tensor_model_parallel_size}}: ranks that share a key and value head are not supported in "
            f"{name}; {{tensor_model_parallel_size:name}} {groups} or less works"
        )
