"""Memory and launch overhead: recomputation, offloading, CUDA graphs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.core.declarations.config_fields import flag, not_a_flag, too_small

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "mlp_act", "mla_up_proj", "moe", "moe_act", "shared_experts")
"""Parts of a layer that can be recomputed separately."""
_MODULES_WITHOUT_EXPERTS = ("mlp", "mlp_act")
_MODULES_OF_EXPERTS = ("moe", "moe_act", "shared_experts")
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""Parts of a layer whose inputs can be kept in host memory."""
GRAPH_PARTS = ("attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess")
"""Parts of a layer that Megatron-LM captures as CUDA graphs."""
_FINE = "fine_grained_activation_offloading"


@dataclass(kw_only=True)
class MemoryConfig:
    """Activations that are kept for backward, offloading, and CUDA graphs."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in backward instead of keeping them: those of whole layers (full), or those of
    --recompute-modules (selective)."""

    recompute_method: Literal["uniform", "block"] | None = flag(None, only_with="recompute_granularity=full")
    """With --recompute-granularity full: keep only the input of each group of --recompute-num-layers layers (uniform),
    or recompute only that many layers of a stage (block)."""

    recompute_num_layers: int | None = flag(None, only_with="recompute_granularity=full")
    """With --recompute-granularity full: layers per group (uniform), or recomputed layers of a stage (block)."""

    recompute_modules: list[str] | None = flag(None, only_with="recompute_granularity=selective", from_checkpoint=True)
    """With --recompute-granularity selective: parts of a layer to recompute, any of core_attn, layernorm, mlp,
    mlp_act (of a layer without experts), mla_up_proj, moe, moe_act, shared_experts. Default: core_attn."""

    mlp_chunks_for_training: int | None = None
    """Compute the MLP of a layer without experts in this many chunks of a rank's tokens, and each chunk again in
    backward. Saves the memory of all that is as wide as its inner layer, for one more forward of the MLP. In fp8 with
    --fp8-recipe tensorwise each chunk has scales of its own."""

    loss_chunk_size: int | None = None
    """Compute logits and loss for this many tokens of a rank at a time, and the logits again in backward. Saves the
    memory of the other logits (2 bytes for each token and entry of the vocabulary) for one more product of the head."""

    distribute_saved_activations: bool | None = flag(False, only_with="tensor_model_parallel_size")
    """With full recomputation: distribute the kept layer inputs over tensor parallel ranks."""

    fine_grained_activation_offloading: bool = False
    """Keep the inputs of --offload-modules in host memory from forward to backward. Copies overlap with computation."""

    offload_modules: list[str] | None = flag(default_factory=list, only_with=_FINE, nargs="+", from_checkpoint=True)
    """With --fine-grained-activation-offloading: parts of a layer whose inputs are kept in host memory, any of
    attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act."""

    min_offloaded_tensor_size: int = flag(1048576, only_with=_FINE)
    """With --fine-grained-activation-offloading: tensors with fewer elements stay on the device."""

    activation_offload_fraction: float = flag(1.0, only_with=_FINE)
    """With --fine-grained-activation-offloading: fraction of the --offload-modules of a stage's layers that are
    offloaded, spread evenly."""

    delta_offload_bytes_across_pp_ranks: int = flag(0, only_with=_FINE)
    """With --fine-grained-activation-offloading: each pipeline rank offloads this many bytes of a micro-batch less than
    the previous rank, because it holds fewer micro-batches."""

    fine_grained_offloading_max_inflight_offloads: int | None = flag(None, only_with=_FINE)
    """With --fine-grained-activation-offloading: number of layers, for each of the --offload-modules, whose copies to
    the host may still run when the next layer's copy starts. More overlap, and more memory. Default: 1."""

    enable_cuda_graph: bool = False
    """Former spelling of --cuda-graph-impl local."""

    external_cuda_graph: bool = False
    """Former spelling of --cuda-graph-impl transformer_engine."""

    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    """Replay CUDA graphs instead of launching kernels one by one, which saves time with small models and micro-batches.
    local: forward, loss and backward of a micro-batch are one graph. transformer_engine and full_iteration are read
    as local where a micro-batch can be a graph, and have no effect elsewhere."""

    cuda_graph_scope: str | list[str] = flag(
        "full", only_with="cuda_graph_impl", or_with="enable_cuda_graph", nargs="+", from_checkpoint=True
    )
    """With --cuda-graph-impl: the captured code, which is a whole micro-batch (full, full_iteration). Parts of layers
    (attn, mamba, mlp, moe, moe_router, moe_preprocess) are read as --cuda-graph-impl transformer_engine."""

    cuda_graph_modules: list[str] = flag(
        default_factory=list,
        only_with="cuda_graph_impl",
        or_with="external_cuda_graph",
        nargs="+",
        from_checkpoint=True,
    )
    """Other spelling of --cuda-graph-scope for parts of layers."""

    cuda_graph_warmup_steps: int = 3
    """With --cuda-graph-impl: number of steps before the capture, at least 1."""

    cuda_graph_use_single_mempool: bool = not_a_flag(False)
    """All graphs share one memory pool."""

    cuda_graph_retain_backward_graph: bool = not_a_flag(False)
    """Keep the autograd graph while a backward graph is captured."""


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each impossible value of `MemoryConfig`; `config` has the fields of TransformerConfig."""
    yield from too_small(config, ("recompute_num_layers", "mlp_chunks_for_training", "loss_chunk_size"), 1)
    yield from too_small(config, ("cuda_graph_warmup_steps",), 1)
    for part in unknown_parts(config) if graph_parts(config) else ():
        yield f"{{cuda_graph_scope:name}}: {part} is no part of a layer; {', '.join(GRAPH_PARTS)} are"
    if config.recompute_granularity == "full":
        missing = []
        if config.recompute_method is None:
            missing.append("{recompute_method:name} uniform or block")
        if config.recompute_num_layers is None:
            missing.append("{recompute_num_layers:name}, such as 1, which recomputes each layer by itself")
        if missing:
            yield f"{{recompute_granularity}} needs {' and '.join(missing)}"
        if config.moe_layer_recompute:
            yield "{moe_layer_recompute}: {recompute_granularity} recomputes layers of experts too; drop one"
    elif config.recompute_granularity == "selective":
        for field in ("recompute_method", "recompute_num_layers"):
            if getattr(config, field) is not None:
                yield f"{{{field}}} goes with {{recompute_granularity:name}} full only"
        yield from _module_problems(config)
    yield from _offloading_problems(config)
    if config.distribute_saved_activations:
        if config.recompute_granularity != "full":
            yield "{distribute_saved_activations} spreads inputs of layers: it needs {recompute_granularity:name} full"
        if config.sequence_parallel:
            yield "{distribute_saved_activations}: {sequence_parallel:name} has spread them already; drop one"


def captures_micro_batches(config: "TransformerConfig") -> bool:
    """Whether whole micro-batches are replayed as CUDA graphs."""
    return config.enable_cuda_graph or config.cuda_graph_impl == "local"


def graph_parts(config: "TransformerConfig") -> bool:
    """Whether the flags ask for graphs of parts of layers or of whole iterations."""
    if config.external_cuda_graph or config.cuda_graph_impl in ("transformer_engine", "full_iteration"):
        return True
    return captures_micro_batches(config) and not set(_graph_scope(config)) <= {"full", "full_iteration"}


def unknown_parts(config: "TransformerConfig") -> list[str]:
    """Returns the words of --cuda-graph-scope and --cuda-graph-modules that Megatron-LM does not have."""
    return [part for part in _graph_scope(config) if part not in ("full", "full_iteration", *GRAPH_PARTS)]


def _graph_scope(config: "TransformerConfig") -> list[str]:
    scope = [config.cuda_graph_scope] if isinstance(config.cuda_graph_scope, str) else config.cuda_graph_scope
    return [*(scope or ()), *(config.cuda_graph_modules or ())]


def _offloading_problems(config: "TransformerConfig") -> Iterator[str]:
    amounts = ("min_offloaded_tensor_size", "delta_offload_bytes_across_pp_ranks")
    yield from too_small(config, (*amounts, "fine_grained_offloading_max_inflight_offloads"), 0)
    yield from too_small(config, ("cpu_offloading_num_layers",), 0)
    if not 0.0 <= config.activation_offload_fraction <= 1.0:
        yield "{activation_offload_fraction} must be from 0 to 1"
    fine, by_layer = config.fine_grained_activation_offloading, config.cpu_offloading_num_layers > 0
    if fine and by_layer:
        yield "{fine_grained_activation_offloading} and {cpu_offloading_num_layers}: choose one"
    if (fine or by_layer) and captures_micro_batches(config):
        name = "fine_grained_activation_offloading" if fine else "cpu_offloading_num_layers"
        yield f"{{{name}}}: a captured micro-batch keeps its activations on the device; drop it or the CUDA graphs"
    if fine and config.recompute_granularity == "full":
        yield (
            "{fine_grained_activation_offloading}: full recomputation keeps the layers' inputs only; "
            "{cpu_offloading_num_layers:name} moves these"
        )
    if fine and not config.offload_modules:
        parts = ", ".join(OFFLOAD_MODULES)
        yield f"{{fine_grained_activation_offloading}} needs {{offload_modules:name}}, any of {parts}"
    for name in config.offload_modules or () if fine else ():
        reason = _why_not_offloaded(config, name)
        if reason:
            yield f"{{offload_modules}}: {name} {reason}"


def _why_not_offloaded(config: "TransformerConfig", module: str) -> str | None:
    """Returns why no layer keeps inputs of this part; None if some layers do."""
    if module not in OFFLOAD_MODULES:
        return f"is no such part of a layer; {', '.join(OFFLOAD_MODULES)} are"
    if module in ("expert_fc1", "moe_act"):
        if config.num_moe_experts is None:
            return "is a part of a layer of experts, and {num_moe_experts:name} is not set"
        if config.moe_layer_recompute or "moe" in (config.recompute_modules or ()):
            return "is recomputed with the whole layer of experts; drop one"
    if module in ("attn_norm", "mlp_norm") and config.norm_placement.startswith("post"):
        return "is the norm before a branch, and {norm_placement} has none"
    return None


def _module_problems(config: "TransformerConfig") -> Iterator[str]:
    for name in config.recompute_modules or ():
        reason = _what_is_missing(config, name)
        if reason:
            yield f"{{recompute_modules}}: {name} {reason}"


def _what_is_missing(config: "TransformerConfig", module: str) -> str | None:
    """Returns why no layer has this part; None if some layers have it."""
    if module not in RECOMPUTE_MODULES:
        return f"is no part of a layer; {', '.join(RECOMPUTE_MODULES)} are"
    if module == "mla_up_proj" and not config.multi_latent_attention:
        return "is a part of {multi_latent_attention:name}, which is not set"
    if module in _MODULES_OF_EXPERTS and config.num_moe_experts is None:
        return "is a part of a layer of experts, and {num_moe_experts:name} is not set"
    only_experts = config.num_moe_experts is not None and config.moe_layer_freq == 1
    alone = set(config.recompute_modules or ()) <= set(_MODULES_WITHOUT_EXPERTS)  # beside others it has no effect
    if module in _MODULES_WITHOUT_EXPERTS and only_experts and alone:
        return f"is a part of a layer without experts, and there is none; {module.replace('mlp', 'moe')} works"
    if module == "mlp_act" and config.fp8 and config.fp8_wgrad and not config.first_last_layers_bf16:
        return "saves nothing with {fp8}: the second product keeps its input in fp8 anyway; mlp saves more"
    if module == "shared_experts" and not config.moe_shared_expert_intermediate_size:
        return "need {moe_shared_expert_intermediate_size:name}, which is not set"
    if module == "shared_experts" and config.moe_shared_expert_overlap:
        return "run in two halves with {moe_shared_expert_overlap:name}; moe recomputes them with the rest of the layer"
    return None
