"""Rules about CUDA graphs: what does not fit into a graph, and what works instead.

As in `checks`, all rules must accept missing and impossible values.
"""

from collections.abc import Iterator

from megatron.core.transformer.config.memory import captures_micro_batches
from megatron.training.config.settings import Settings


def micro_batch_graphs(s: Settings) -> Iterator[str]:
    """A graph of a micro-batch has no communication, fixed shapes and memory at fixed addresses."""
    if not captures_micro_batches(s):
        return
    name = "{enable_cuda_graph:name}" if s.enable_cuda_graph else "{cuda_graph_impl}"
    for field in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    ):
        if getattr(s, field) > 1:
            yield f"{name}: a captured micro-batch does not communicate; it needs {{{field}:name}} 1, not {{{field}}}"
    if s.num_moe_experts is not None:
        yield f"{name}: {{num_moe_experts}} give shapes that depend on the tokens; a model without experts works"
    if s.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params"):
        yield (
            f"{name}: {{data_parallel_sharding_strategy}} frees memory between uses, and a graph needs fixed "
            "addresses; no_shard and optim work"
        )
    if s.fp8 is not None:
        yield f"{name}: layers with {{fp8}} quantise weights in the first micro-batch of a step only; bf16 works"
    for field in ("reset_attention_mask", "sft"):
        if getattr(s, field):
            yield f"{name}: the number of documents in a batch is not fixed with {{{field}:name}}; leave one out"
    for field in ("save_activations_interval", "save_dgrads_interval"):
        if getattr(s, field) is not None:
            yield f"{name}: {{{field}:name}} watches modules, which a graph does not call; leave one out"
    if s.log_straggler:
        yield f"{name}: {{log_straggler:name}} measures forward steps, which do not run one by one; leave one out"


def optimizer_graph(s: Settings) -> Iterator[str]:
    """A graph of the optimizer's step has no communication, and its numbers are constants or on the device."""
    if not s.optimizer_cuda_graph:
        return
    if s.world_size > 1:
        yield (
            f"{{optimizer_cuda_graph:name}}: the update communicates between {s.world_size} ranks; leave it out, or "
            "train on one"
        )
    if s.optimizer_cpu_offload:
        yield "{optimizer_cuda_graph:name} keeps the state on the device; drop it or {optimizer_cpu_offload:name}"
    if s.optimizer not in ("adam", "sgd"):
        yield "{optimizer_cuda_graph:name}: {optimizer} is not captured; adam and sgd are"
    if s.weight_decay_incr_style != "constant":
        yield (
            "{optimizer_cuda_graph:name}: weight decay is a constant of the graph, and {weight_decay_incr_style} "
            "changes it; leave one out"
        )
