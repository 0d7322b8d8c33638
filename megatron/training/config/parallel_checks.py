"""Rules about layouts: whether the parallel sizes fit the number of ranks, the sequence, the layers and the batch, and
what --exact-data-parallel-sums does not cover.

The library's configs check the parallel sizes against the model's own sizes. As in `checks`, all rules must accept
missing and impossible values; other rules report these.
"""

import math
from collections.abc import Iterator

import torch

from megatron.core.dist_checkpointing.local_copies import copy_offsets
from megatron.core.distributed.exact_sums import MICRO_BATCHES
from megatron.core.exceptions import UserError
from megatron.core.groups.rank_grid import nearest_divisors
from megatron.training.config.settings import Settings, gpus_of_node


def ranks(s: Settings) -> Iterator[str]:
    """The number of ranks is a multiple of the ranks of one model."""
    size = s.tensor_model_parallel_size * s.pipeline_model_parallel_size * s.context_parallel_size
    if size < 1 or s.world_size % size == 0:
        return
    below = s.world_size // size * size
    worlds = f"{below} or {below + size}" if below else f"{size}"
    products = " or ".join(map(str, nearest_divisors(s.world_size, size)))
    start = "" if s.launch_environment.world_size_is_given else f" (torchrun --nproc_per_node {size})"
    yield (
        f"{_ranks_text(s)} not divisible by {size}, which is {{tensor_model_parallel_size}} x "
        f"{{pipeline_model_parallel_size}} x {{context_parallel_size}}; start {worlds} ranks{start}, or give sizes "
        f"whose product is {products}"
    )


def _ranks_text(s: Settings) -> str:
    return "1 rank (WORLD_SIZE) is" if s.world_size == 1 else f"{s.world_size} ranks (WORLD_SIZE) are"


def ranks_of_experts(s: Settings) -> Iterator[str]:
    """The number of ranks is a multiple of the ranks of one set of experts, and training with TP uses sequence
    parallelism."""
    if s.num_moe_experts is None:
        return
    tensor = s.tensor_model_parallel_size
    expert_tensor = tensor if s.expert_tensor_parallel_size is None else s.expert_tensor_parallel_size
    size = expert_tensor * s.expert_model_parallel_size * s.pipeline_model_parallel_size
    if size >= 1 and s.world_size % size:
        name, more = "{expert_tensor_parallel_size}", ""
        if s.expert_tensor_parallel_size is None:
            name = f"{{expert_tensor_parallel_size:name}} {tensor} (as {{tensor_model_parallel_size:name}})"
            without = size // tensor if tensor > 1 else size
            if s.world_size % without == 0 and without < size:
                more = ", or {expert_tensor_parallel_size:name} 1"
        products = " or ".join(map(str, nearest_divisors(s.world_size, size)))
        yield (
            f"{_ranks_text(s)} not divisible by {size}, which is {name} x "
            f"{{expert_model_parallel_size}} x {{pipeline_model_parallel_size}}; give sizes whose product is {products}"
            f"{more}"
        )
    if tensor > 1 and not s.sequence_parallel and not s.skip_train:
        yield (
            "{num_moe_experts} with {tensor_model_parallel_size}: training needs {sequence_parallel:name}, since "
            "without it all tensor parallel ranks send the same tokens to the experts; add it"
        )


def ranks_of_nodes(s: Settings) -> Iterator[str]:
    """A run has as many ranks on each node as its flags say."""
    said, found = s.gpus_per_node, s.launch_environment.ranks_of_host
    if said is not None and found not in (None, said) and not s.dry_run and s.world_size > (found or 0):
        yield (
            f"{{gpus_per_node}}: the launcher has started {found} of the {s.world_size} ranks on this host; start "
            f"{said} on each, or use {found} and check the parallel sizes"
        )


def copies_of_state(s: Settings) -> Iterator[str]:
    """--replication names as many different ranks as copies are asked for."""
    jump, factor = s.replication_jump, s.replication_factor
    if not s.replication or jump is None or jump < 1 or factor < 2 or s.world_size == 1:
        return
    try:
        copy_offsets(s.world_size, jump, factor)
    except UserError as error:
        yield f"{{replication_jump}} with {{replication_factor}}: {error}; give a jump or a factor that fits"


def tensor_parallel_groups(s: Settings) -> Iterator[str]:
    """The ranks of a tensor parallel group share NVLink. There is no rule if the size of a node is not known."""
    domain = gpus_of_domain(s)
    if domain is None or domain < 1 or s.allow_tensor_parallel_across_nodes or s.world_size <= domain:
        return
    experts = s.num_moe_experts is not None and s.expert_tensor_parallel_size not in (None, 1)
    for field in ("tensor_model_parallel_size", *["expert_tensor_parallel_size"] * experts):
        size = getattr(s, field)
        if size > 1 and domain % size:
            works = " or ".join(map(str, nearest_divisors(domain, size)))
            yield (
                f"{{{field}}}: ranks of one group would be on several nodes, because {_domain_text(s, domain)}, and "
                f"would send all activations over the network; use {works}, or give "
                "{allow_tensor_parallel_across_nodes:name}"
            )


def gpus_of_domain(s: Settings) -> int | None:
    """Returns the number of ranks that share NVLink; None if it is not known."""
    found: int | None = s.gpus_per_nvlink_domain or gpus_of_node(s.gpus_per_node, s.launch_environment)
    return found


def _domain_text(s: Settings, domain: int) -> str:
    if s.gpus_per_nvlink_domain is not None:
        return f"{{gpus_per_nvlink_domain:name}} is {domain}"
    if s.gpus_per_node is not None:
        return f"{{gpus_per_node:name}} is {domain}"
    found = "starts" if s.launch_environment.ranks_of_host is not None else "can start"
    return f"the launcher {found} {domain} on each node ({{gpus_per_nvlink_domain:name}} if NVLink connects more)"


def sequence_length(s: Settings) -> Iterator[str]:
    """A sequence divides into two equal chunks per context parallel rank, and each rank's part into equal slices for
    sequence parallelism."""
    length, context, tensor = s.seq_length or 0, s.context_parallel_size, s.tensor_model_parallel_size
    if length < 1 or context < 1 or tensor < 1:
        return
    chunks = 2 * context if context > 1 else 1
    if length % chunks:
        yield (
            f"{{seq_length}} is not divisible by {chunks}, two chunks for each rank of {{context_parallel_size}}; "
            f"use {multiples_near(length, chunks)}"
        )
    elif s.sequence_parallel and length // context % tensor:
        share = f", of which a context parallel rank has {length // context}," if context > 1 else ""
        near = multiples_near(length, math.lcm(chunks, context * tensor))
        yield (
            f"{{sequence_parallel}}: {{seq_length}}{share} is not divisible by {{tensor_model_parallel_size}}; "
            f"use {near}"
        )


def virtual_stages(s: Settings) -> Iterator[str]:
    """The number of model chunks per pipeline stage is given in one way, and divides the layers evenly."""
    stages, layers = s.pipeline_model_parallel_size, s.num_layers or 0
    fields = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    given = [field for field in (*fields, "pipeline_model_parallel_layout") if getattr(s, field) is not None]
    if s.pipeline_model_parallel_layout == "auto":  # auto balances the requested number of chunks
        given.remove("pipeline_model_parallel_layout")
    if len(given) > 1:
        names = " and ".join(f"{{{field}}}" for field in given)
        yield f"{names} say in {len(given)} ways how many chunks a pipeline stage has; give one"
    each = s.num_layers_per_virtual_pipeline_stage
    ends = s.num_layers_in_first_pipeline_stage, s.num_layers_in_last_pipeline_stage
    if each is None or each < 1 or stages < 2 or layers < 1 or ends != (None, None):
        return
    counted = layers + s.account_for_embedding_in_pipeline_split + s.account_for_loss_in_pipeline_split
    if counted % stages == 0 and counted // stages % each:
        near = " or ".join(map(str, nearest_divisors(counted // stages, each)))
        yield (
            f"{{num_layers_per_virtual_pipeline_stage}} does not divide the {counted // stages} layers of each of the "
            f"{stages} pipeline stages; use {near}"
        )


def sharding(s: Settings) -> Iterator[str]:
    """The sharding strategy is given in one way, and the number of optimizer instances divides the replicas."""
    if s.use_torch_fsdp2 and s.use_megatron_fsdp and s.data_parallel_sharding_strategy != "optim_grads_params":
        yield (
            "{use_torch_fsdp2} shards weights, gradients and optimizer state, {data_parallel_sharding_strategy} shards "
            "less; give one"
        )
    if s.num_distributed_optimizer_instances < 1:
        yield "{num_distributed_optimizer_instances} must be at least 1"
    elif s.use_distributed_optimizer:
        yield from _instances(s)


def _instances(s: Settings) -> Iterator[str]:
    """The number of optimizer instances divides the replicas of dense weights and those of experts."""
    replicas = {"data and context parallel ranks": s.data_parallel_size * s.context_parallel_size}
    if s.num_moe_experts is not None:
        tensor = s.expert_tensor_parallel_size or s.tensor_model_parallel_size
        of_experts = tensor * s.expert_model_parallel_size * s.pipeline_model_parallel_size
        if of_experts > 0 and s.world_size % of_experts == 0:
            replicas["data parallel ranks of an expert"] = s.world_size // of_experts
    instances = s.num_distributed_optimizer_instances
    for what, count in replicas.items():
        if count > 0 and count % instances:
            near = " or ".join(map(str, nearest_divisors(count, instances)))
            yield f"{{num_distributed_optimizer_instances}} does not divide the {count} {what}; use {near}"


def multiples_near(number: int, of: int) -> str:
    """Returns the multiples of `of` just below and just above a number, as advice."""
    below = number // of * of
    return f"{below} or {below + of}" if below else f"{below + of}"


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
