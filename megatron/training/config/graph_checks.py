"""Rules about CUDA graphs: what does not fit into a graph, and what works instead.

As in `checks`, all rules must accept missing and impossible values.
"""

from collections.abc import Iterator

from megatron.core.pipeline_parallel.captured_micro_batch import MOST_GRAPHS
from megatron.core.transformer.config.memory import captures_micro_batches
from megatron.core.transformer.config.router import listed
from megatron.training.config.settings import Settings, batch_steps


def micro_batch_graphs(s: Settings) -> Iterator[str]:
    """A graph of a micro-batch has no communication, fixed shapes and memory at fixed addresses."""
    if captures_micro_batches(s.transformer):
        name = "{enable_cuda_graph:name}" if s.enable_cuda_graph else "{cuda_graph_impl}"
        yield from (f"{name}: {problem}" for problem in why_no_graph(s))


def why_no_graph(s: Settings) -> Iterator[str]:
    """Yields each reason why a micro-batch cannot be a graph."""
    for field in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    ):
        if getattr(s, field) > 1:
            yield (
                f"{{{field}}} communicates inside a micro-batch, and a graph does not; leave the graphs out, "
                f"or give {{{field}:name}} 1 and use more data parallel ranks ({{use_distributed_optimizer:name}})"
            )
    if s.num_moe_experts is not None:
        yield from _experts(s)
    if s.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params"):
        yield (
            "{data_parallel_sharding_strategy} frees memory between uses, and a graph needs fixed addresses; no_shard "
            "and optim work"
        )
    for field in ("reset_attention_mask", "sft"):
        if getattr(s, field):
            yield f"the number of documents in a batch is not fixed with {{{field}:name}}; leave one out"
    for field in ("save_activations_interval", "save_dgrads_interval"):
        if getattr(s, field) is not None:
            yield f"{{{field}:name}} watches modules, which a graph does not call; leave one out"
    flag, sizes = _batch_sizes(s)
    if len(sizes) > MOST_GRAPHS:
        yield (f"each batch size has a graph, and {{{flag}:name}} has {len(sizes)} sizes; give at most {MOST_GRAPHS}")
    if s.log_straggler:
        yield "{log_straggler:name} measures forward steps, which do not run one by one; leave one out"


_COUNTED = 10_000
"""Sizes of a ramp that are counted; far more than there are graphs."""


def _batch_sizes(s: Settings) -> tuple[str, set[int]]:
    """Returns the flag that changes the batch size, and the numbers of micro-batches of its sizes."""
    flag, sizes, steps = "rampup_batch_size", [], batch_steps(s)
    if steps is not None:
        flag, sizes = "step_batch_size_schedule", [size for _, size in steps.steps]
    elif s.rampup_batch_size is not None and s.global_batch_size and min(s.rampup_batch_size) > 0:
        start, increment, _ = s.rampup_batch_size
        ramp = range(start, s.global_batch_size, increment)
        sizes = [*ramp[:_COUNTED], s.global_batch_size]
    return flag, {size // max(1, (s.micro_batch_size or 1) * s.data_parallel_size) for size in sizes}


def _experts(s: Settings) -> Iterator[str]:
    """The host needs no counts of tokens: the experts' products are grouped, and nothing else reads them."""
    if not (s.moe_grouped_gemm and s.bf16):
        yield "{num_moe_experts} need {moe_grouped_gemm:name} and {bf16:name} in a graph"
    for field in ("moe_expert_capacity_factor", "moe_enable_routing_replay"):
        if getattr(s, field):
            yield f"{{{field}:name}} reads on the host which experts take a token; leave it out"
    if "global_aux_loss" in listed(s.moe_router_load_balancing_type):
        yield "global_aux_loss counts micro-batches on the host; aux_loss and seq_aux_loss work"
