"""RecomputeCache and launch overhead: recomputation, offloading, CUDA graphs."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_a_flag, not_yet


@dataclass(kw_only=True)
class MemoryConfig:
    """What is kept for backward, and where; what is captured into graphs."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Forget activations and compute them again in backward: of whole layers, or of --recompute-modules."""

    recompute_method: Literal["uniform", "block"] | None = flag(None, only_with="recompute_granularity")
    """With --recompute-granularity full: groups of --recompute-num-layers layers each recomputed from its input
    (uniform), or only that many layers recomputed (block)."""

    recompute_num_layers: int | None = flag(None, only_with="recompute_granularity")
    """With --recompute-granularity full: layers in a group (uniform), or layers recomputed (block)."""

    recompute_modules: list[str] | None = flag(None, only_with="recompute_granularity=selective")
    """With --recompute-granularity selective: parts of a layer that are recomputed (core_attn, layernorm, mlp,
    mla_up_proj, moe, moe_act, shared_experts); core_attn when not given."""

    distribute_saved_activations: bool | None = flag(False, only_with="tensor_model_parallel_size")
    """With full recomputation: spread the kept layer inputs over tensor parallel ranks."""

    fine_grained_activation_offloading: bool = not_yet(False)
    """Keep the inputs of --offload-modules in host memory until backward."""

    offload_modules: list[str] | None = flag(
        default_factory=list, only_with="fine_grained_activation_offloading", nargs="+"
    )
    """With --fine-grained-activation-offloading: parts of a layer whose input is moved."""

    min_offloaded_tensor_size: int = flag(1048576, only_with="fine_grained_activation_offloading")
    """With --fine-grained-activation-offloading: elements of the smallest tensor that is moved."""

    enable_cuda_graph: bool = not_yet(False)
    """Former spelling of --cuda-graph-impl local."""

    external_cuda_graph: bool = not_yet(False)
    """Former spelling of --cuda-graph-impl transformer_engine."""

    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = not_yet("none")
    """Replay CUDA graphs instead of launching kernels one by one."""

    cuda_graph_scope: str | list[str] = flag("full", only_with="cuda_graph_impl", nargs="+")
    """With --cuda-graph-impl: what is captured."""

    cuda_graph_warmup_steps: int = flag(3, only_with="cuda_graph_impl")
    """With --cuda-graph-impl: steps before capture."""

    cuda_graph_use_single_mempool: bool = not_a_flag(False)
    """All graphs share one memory pool."""

    cuda_graph_retain_backward_graph: bool = not_a_flag(False)
    """Keep the autograd graph while a backward graph is captured."""
