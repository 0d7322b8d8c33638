"""Rules of --exact-data-parallel-sums: what its guarantee does not cover is refused."""

from collections.abc import Iterator

import torch

from megatron.core.distributed.exact_sums import MICRO_BATCHES
from megatron.training.config.settings import Settings

_SPLITS = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)


def exact_sums(s: Settings) -> Iterator[str]:
    """--exact-data-parallel-sums goes only with runs whose steps are functions of their micro-batches, added up
    exactly."""
    if not s.exact_gradient_sums:
        return
    if not s.deterministic_mode:
        yield "{exact_gradient_sums} needs {deterministic_mode:name}: other kernels sum in an order that varies"
    for field in _SPLITS:
        if getattr(s, field) > 1:
            yield f"{{exact_gradient_sums}} covers data parallel ranks only, not {{{field}}}: layers round their sums"
    if s.num_moe_experts is not None:
        yield "{exact_gradient_sums}: not yet with {num_moe_experts:name}, whose gradients are summed over other ranks"
    for field in ("fp16", "fp64", "fp8", "fp4"):
        if getattr(s, field, None):
            yield f"{{exact_gradient_sums}}: not yet with {{{field}}}; float32 and {{bf16:name}} work"
    for field in ("grad_reduce_in_bf16", "average_in_collective"):
        if getattr(s, field):
            yield f"{{exact_gradient_sums}}: gradients are sent as whole numbers; leave out {{{field}}}"
    if s.main_grads_dtype is torch.bfloat16:
        yield "{exact_gradient_sums} needs main gradients in fp32, not {main_grads_dtype}"
    if s.num_distributed_optimizer_instances > 1:
        yield "{exact_gradient_sums}: not yet with {num_distributed_optimizer_instances}; 1 works"
    if s.optimizer not in ("adam", "sgd"):
        yield "{exact_gradient_sums}: not yet with {optimizer}; adam and sgd update each weight by itself"
    if s.cuda_graph_impl == "local":
        yield "{exact_gradient_sums}: {cuda_graph_impl} replays micro-batches without adding them up; leave it out"
    yield from _batch_problems(s)


def _batch_problems(s: Settings) -> Iterator[str]:
    if s.global_batch_size is None or s.micro_batch_size is None:
        return
    if not s.is_given("global_batch_size"):
        yield (
            "{exact_gradient_sums} needs {global_batch_size:name}: without it, the batch grows with the number of data "
            f"parallel ranks; {s.global_batch_size} is the value for this one"
        )
    elif s.global_batch_size > MICRO_BATCHES * s.micro_batch_size:
        yield (
            f"{{exact_gradient_sums}} adds up at most {MICRO_BATCHES} micro-batches of {{micro_batch_size}}, and "
            "{global_batch_size} has more: use larger ones"
        )
    if s.decrease_batch_size_if_needed:
        yield "{exact_gradient_sums}: {decrease_batch_size_if_needed} changes the batch with the number of ranks"
