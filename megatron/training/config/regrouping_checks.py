"""Rules about dynamic context parallelism (--hybrid-context-parallel): what it needs, and what it does not go with.

The library's config checks the layers of the model. As in `checks`, the rule must accept missing and impossible values.
"""

import math
from collections.abc import Iterator

from megatron.training.config.settings import Settings

_NOT_WITH = {
    "pipeline_model_parallel_size": "stages pass on micro-batches of one length; use 1",
    "attention_dropout": "masks are made for rows that lie in their order; use 0",
    "hidden_dropout": "masks are made for rows that lie in their order; use 0",
    "lora_dropout": "masks are made for rows that lie in their order; use 0",
    "balanced_packing": "documents are already placed by their cost; leave it out",
    "exact_gradient_sums": "it adds up micro-batches that depend on the number of ranks; leave one out",
    "tp_comm_overlap": "not yet with micro-batches of different lengths; leave it out",
}


def regrouped_ranks(s: Settings) -> Iterator[str]:
    """Dynamic context parallelism needs documents, a loss per token, a power of two of ranks, and room for a row."""
    if not s.hybrid_context_parallel:
        return
    name = "{hybrid_context_parallel:name}"
    if s.model_family not in (None, "gpt"):
        yield f"{name} is for models of pretrain_gpt.py, not for {{model_family}}; leave it out"
    if s.datasets_of_script:
        yield f"{name} needs the data and the forward step of pretrain_gpt.py; this script has its own: leave it out"
    if not (s.sft or s.reset_attention_mask):
        yield f"{name} places the documents of rows: give {{sft:name}} or {{reset_attention_mask:name}}"
    if not s.calculate_per_token_loss:
        yield f"{name} needs {{calculate_per_token_loss:name}}: its micro-batches have different numbers of tokens"
    for field, why in _NOT_WITH.items():
        value = getattr(s, field)
        if value and value != (1 if field == "pipeline_model_parallel_size" else 0):
            yield f"{name} does not go with {{{field}}}: {why}"
    if s.dataloader_type == "external":
        yield f"{name} places the documents of data sets, which {{dataloader_type}} does not have; leave it out"
    if s.use_torch_fsdp2 or s.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params"):
        sharding = "{use_torch_fsdp2:name}" if s.use_torch_fsdp2 else "{data_parallel_sharding_strategy}"
        yield (
            f"{name} does not go with {sharding}, for which all ranks need equally many micro-batches; "
            "{use_distributed_optimizer:name} works"
        )
    yield from _sizes(s)


def _sizes(s: Settings) -> Iterator[str]:
    ranks, room = s.data_parallel_size * s.context_parallel_size, s.max_seqlen_per_dp_cp_rank or 0
    if ranks < 1 or room < 1:
        return
    if ranks & (ranks - 1):
        near = 1 << (ranks.bit_length() - 1)
        yield (
            f"{{hybrid_context_parallel:name}} divides the {ranks} data and context parallel ranks in halves again and "
            f"again; use {near} or {2 * near} of them"
        )
    tensor = s.tensor_model_parallel_size if s.sequence_parallel else 1
    chunks = math.lcm(2, max(1, tensor))
    if room % chunks:
        near = room - room % chunks
        yield (
            f"{{max_seqlen_per_dp_cp_rank}} is not divisible by {chunks}, the chunks of a rank; use "
            f"{near or near + chunks} or {near + chunks}"
        )
    elif (s.seq_length or 0) > ranks * room:
        least = -(-(s.seq_length or 0) // (ranks * chunks)) * chunks
        yield (
            f"{{max_seqlen_per_dp_cp_rank}}: the {ranks} data and context parallel ranks together have no room for a "
            f"row of {{seq_length}}; use {least} or more"
        )
