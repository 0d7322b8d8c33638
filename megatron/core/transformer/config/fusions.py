"""Fused kernels. The backend chooses kernels when a layer is built; only fields that change numbers have an effect."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.declarations.config_fields import flag, not_a_flag, not_yet
from megatron.core.ops.transformer_engine.engine import uses_engine

_CHOSEN = "kernels are chosen with their backend when a layer is built"


@dataclass(kw_only=True)
class FusionConfig:
    """Operations that can run as one kernel."""

    transformer_impl: Literal["auto", "local", "triton", "transformer_engine", "inference_optimized"] = flag(
        "auto", supported=["auto", "local", "triton", "transformer_engine"]
    )
    """Implementation of the layers: plain torch (local), our own GPU kernels (triton), Transformer Engine, or auto,
    which uses the fastest one available. All compute the same function of the same weights."""

    torch_compile: bool = False
    """Let torch.compile generate the kernels of operations in layers: norms, rotary positions, activations, sums of
    bias and residual. Products, attention, dropout, routing, loss and optimizer do not change. The first step takes
    longer. On a GPU these kernels replace our own."""

    torch_compile_backend: Literal["inductor", "aot_eager"] = flag("inductor", only_with="torch_compile")
    """With --torch-compile: inductor generates kernels, by a C++ compiler on a CPU and Triton on a GPU. aot_eager runs
    the traced graphs with torch's own kernels, to find errors; it is not faster."""

    bias_activation_fusion: bool = not_a_flag(False)
    """Add the bias inside the activation. With gelu this selects the tanh approximation; without it gelu is exact."""

    bias_dropout_fusion: bool = flag(False, off="--no-bias-dropout-fusion", no_effect=_CHOSEN)
    """Add bias and residual in the dropout kernel."""

    masked_softmax_fusion: bool = flag(
        False,
        off="--no-masked-softmax-fusion",
        off_help="Compute scale, mask and softmax of unfused attention in separate kernels.",
        no_effect=_CHOSEN,
    )
    """Scale, mask and softmax of unfused attention in one kernel."""

    persist_layer_norm: bool = flag(False, off="--no-persist-layer-norm", no_effect=_CHOSEN)
    """Use a persistent kernel for layer norm."""

    memory_efficient_layer_norm: bool = not_a_flag(False)
    """Recompute a norm's input from its output."""

    apply_rope_fusion: bool = flag(False, off="--no-rope-fusion", no_effect=_CHOSEN)
    """Apply rotary positions in one kernel."""

    fused_single_qkv_rope: bool = not_a_flag(False)
    """Apply rotary positions to the joint QKV tensor."""

    use_fused_weighted_squared_relu: bool = flag(
        False,
        only_with="num_moe_experts",
        no_effect="on a GPU an expert's activation and the router's weights are one kernel for every activation",
    )
    """Apply the squared relu of experts and the router's weights in one kernel."""

    disable_bf16_reduced_precision_matmul: bool = flag(False, only_with="bf16")
    """GPU, bf16: if cuBLAS splits a matrix product into partial sums, add these in float32 instead of bfloat16. Sets
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction."""

    clone_scatter_output_in_embedding: bool = flag(
        True,
        off="--disable-clone-scatter-output-in-embedding",
        off_help="Do not copy a rank's part of the embedding's output. The whole output then stays in memory.",
        aliases=["--no-clone-scatter-output-in-embedding"],
        no_effect="a rank's part of the embedding's output is reduced into separate memory; the rest is never kept",
    )
    """Copy a rank's part of the embedding's output, so that the whole output can be freed."""

    use_kitchen: bool = not_a_flag(False)
    """Use layers of NVIDIA's unpublished extension Kitchen."""

    use_kitchen_attention: bool = not_yet(False)
    """Use attention of NVIDIA's unpublished extension Kitchen."""

    kitchen_attention_backend: Literal["sdpa", "fa"] = flag("sdpa", only_with="use_kitchen_attention")
    """With --use-kitchen-attention: attention kernel."""

    batch_invariant_mode: bool = not_yet(False)
    """Use only kernels whose result for a sample does not depend on the other samples of the batch."""

    test_mode: bool = flag(False, no_effect="it only served tests of Megatron-LM")
    """Used by Megatron-LM's tests."""

    config_logger_dir: str = flag("", no_effect="--print-config shows every value and where it comes from")
    """Folder to which configs are written."""


def validate(config: Any) -> Iterator[str]:
    """Yields a problem for each impossible combination of FusionConfig's fields, as a sentence for
    `config_fields.describe_problem`."""
    if not config.torch_compile:
        return
    if config.enable_cuda_graph or config.external_cuda_graph or config.cuda_graph_impl != "none":
        yield "{torch_compile} with CUDA graphs: both replace the launches of a layer's kernels; choose one"
    if config.transformer_impl == "transformer_engine" and uses_engine(config):
        yield "{torch_compile}: {transformer_impl} has kernels of its own; {transformer_impl:name} auto or local works"
    if config.deterministic_mode:
        yield (
            "{torch_compile}: the compiler measures which kernels are fast, so runs may differ in rounding; drop it or "
            "{deterministic_mode}"
        )
    if config.fine_grained_activation_offloading or config.cpu_offloading_num_layers > 0:
        fine = config.fine_grained_activation_offloading
        name = "fine_grained_activation_offloading" if fine else "cpu_offloading_num_layers"
        yield f"{{torch_compile}}: {{{name}}} moves tensors that operations save; drop one, or recompute activations"
    if config.overlap_moe_expert_parallel_comm:
        yield "{torch_compile}: {overlap_moe_expert_parallel_comm} computes in several threads; drop one"
