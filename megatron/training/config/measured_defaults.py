"""Defaults that follow from measurements and not from the meaning of a flag.

Each rule holds where it was measured to be faster. `MEASURED` has its number and the row that it came from.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron.training.config.settings import Settings


@dataclass(frozen=True)
class Measured:
    """A limit between two ways to compute the same."""

    limit: float
    row: str
    """Where docs/benchmarks.md has the times of both ways."""


MEASURED = {
    # Most rows that flex may send, as a share of those of allgather. With equal rows allgather has fewer steps.
    "flex": Measured(0.9, "Two GPUs, ways to communicate: MOE64, EP 2, `flex` 408.1 ms, `allgather` 389.0 ms"),
    # Least rows that even routing gives each expert from each of two ranks, with which the exchange is hidden.
    "rows": Measured(2048, "Two GPUs: MOE64, EP 2: `allgather` 389.0 ms, with delayed weight gradients 363.9 ms"),
    # Least experts of a token with which allgather is faster than alltoall.
    "allgather": Measured(4, "Two GPUs: MOE64, EP 2, micro-batch 8: `alltoall` 413.1, `allgather` 320.1 ms"),
    # Least tokens of a rank whose products are cut.
    "pieces": Measured(2048, "Two GPUs, ways to communicate: LLAMA1B, TP 2: whole products 593.6 ms, in pieces 544.5"),
}

ALLGATHER_IS_FASTER = (
    "--moe-token-dispatcher-type alltoall: on two GPUs of one host a model with 8 experts for a token trained 1.29 "
    "times as fast with --moe-token-dispatcher-type allgather (docs/moe.md)"
)


def _pairs_share_a_host(s: Settings) -> bool:
    ranks = s.launch_environment.ranks_of_host
    return bool(s.launch_environment.has_cuda and ranks is not None and ranks % 2 == 0)


def _dispatcher(s: Settings) -> str | None:
    """Chooses the flex dispatcher on GPUs where it sends clearly fewer rows than Megatron-LM's default, which sends
    every token to every rank."""
    ranks, experts, chosen = s.expert_model_parallel_size, s.num_moe_experts or 0, s.moe_router_topk
    is_possible = ranks > 1 and experts % ranks == 0 and 0 < chosen <= experts
    if not (is_possible and s.launch_environment.has_cuda) or s.is_given("moe_token_dispatcher_type"):
        return None
    # The probability that even routing gives a token none of the experts of a rank.
    none = math.comb(experts - experts // ranks, chosen) / math.comb(experts, chosen)
    if 1.0 - none > MEASURED["flex"].limit:
        return None
    s.set_derived("moe_token_dispatcher_type", "flex")
    return (
        f"--moe-token-dispatcher-type flex: the default here, because even routing sends a token to {1.0 - none:.0%} "
        "of the other ranks; Megatron-LM's default, allgather, sends it to all of them"
    )


def _expert_exchange(s: Settings) -> str | None:
    """Hides the exchange of two expert parallel ranks behind weight gradients."""
    experts = s.num_moe_experts or 0
    whole_experts = (s.expert_tensor_parallel_size or s.tensor_model_parallel_size) == 1
    if not (_pairs_share_a_host(s) and s.expert_model_parallel_size == 2 and experts > 0 and whole_experts):
        return None
    graphs = s.enable_cuda_graph or s.external_cuda_graph or s.cuda_graph_impl != "none"
    if graphs or s.use_megatron_fsdp or s.use_torch_fsdp2:
        return None
    tokens = (s.micro_batch_size or 0) * (s.seq_length or 0)
    tokens //= max(1, s.tensor_model_parallel_size * s.context_parallel_size)
    rows = tokens * s.moe_router_topk // experts
    if rows < MEASURED["rows"].limit or s.moe_token_dispatcher_type == "flex":
        return None
    if s.moe_token_dispatcher_type == "alltoall":
        return None if s.moe_router_topk < MEASURED["allgather"].limit else ALLGATHER_IS_FASTER
    if s.is_given("delay_wgrad_compute"):
        return None
    s.set_derived("delay_wgrad_compute", True)
    return (
        "--delay-wgrad-compute: the default of two expert parallel ranks with GPUs of one host; "
        "--no-delay-wgrad-compute turns it off"
    )


def _products_in_pieces(s: Settings) -> str | None:
    """Cuts products of two tensor parallel ranks, whose exchanges then run behind products."""
    ranks = s.tensor_model_parallel_size
    refused = s.is_given("tp_comm_overlap") or s.lora_rank is not None or s.hybrid_context_parallel
    if refused or not (_pairs_share_a_host(s) and s.sequence_parallel and ranks == 2):
        return None
    tokens = (s.micro_batch_size or 0) * (s.seq_length or 0) // (ranks * max(1, s.context_parallel_size))
    # Transformer Engine's linear layers compute whole products. Layers that communicate are in no CUDA graph.
    if tokens < MEASURED["pieces"].limit or s.fp8 is not None or s.transformer_impl == "transformer_engine":
        return None
    s.set_derived("tp_comm_overlap", True)
    if not s.is_given("tp_comm_overlap_rs_dgrad"):
        s.set_derived("tp_comm_overlap_rs_dgrad", True)
    return (
        "--tp-comm-overlap --tp-comm-overlap-rs-dgrad: the default of two tensor parallel ranks with GPUs of one host; "
        "--no-tp-comm-overlap turns it off"
    )


MEASURED_RULES: tuple[Callable[[Settings], str | None], ...] = (_dispatcher, _expert_exchange, _products_in_pieces)
"""The rules, in the order in which they are applied."""
