"""Ways for a run to need less memory: flags, the bytes that they save, and their price in time."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed.sharding_strategy import ShardingStrategy, sharding_strategy_of
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_costs import layer_cost
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.pretrain_config import PretrainConfig

PeakOf = Callable[[PretrainConfig], int]
"""Returns the bytes that the fullest rank of a run allocates."""
_OPERATIONS, _BYTES = 6e14, 4.8e12
"""Operations of products and bytes of memory a second, for prices: about those of an H200 in bfloat16."""
_TO_HOST = 5e10
"""Bytes a second between a GPU and its host."""
_NODE, _WITHIN_NODE, _BETWEEN_NODES = 8, 3e11, 5e10
"""Ranks of a node, and bytes a second of each GPU to others of its node and of other nodes, if nothing hides them."""
_LEAST = 0.01
"""A way must save this part of the peak."""


@dataclass(frozen=True)
class WayOut:
    """Flags with which a run needs less memory."""

    flags: str
    saved: int
    """Bytes of the fullest rank."""
    price: float
    """Time that a step takes longer, as a part of its time; an estimate at the rates of an H200. 0: none."""


@dataclass(frozen=True)
class _Candidate:
    flags: str
    price: float
    changes: Mapping[str, Mapping[str, object]]
    """New values by field, by part of the config."""


def ways_out(config: PretrainConfig, peak_of: PeakOf, least: int = 0) -> list[WayOut]:
    """Returns the three cheapest ways that save at least `least` bytes; if there are fewer, other ways follow, those
    that save most first. `peak_of` computes the peak of a changed config."""
    before, found = peak_of(config), list[WayOut]()
    for candidate in sorted(_candidates(config), key=lambda candidate: candidate.price):
        prices = [way.price for way in found if way.saved >= least]
        if len(prices) >= 3 and candidate.price > prices[2]:
            break  # each further one costs more
        try:
            saved = before - peak_of(_changed(config, candidate.changes))
        except UserError:  # the changed config is impossible
            continue
        if saved >= _LEAST * before:
            found.append(WayOut(candidate.flags, saved, candidate.price))
    enough = sorted((way for way in found if way.saved >= least), key=lambda way: (way.price, -way.saved))
    others = sorted((way for way in found if way.saved < least), key=lambda way: -way.saved)
    return [*enough, *others][:3]


def way_text(way: WayOut, size_text: Callable[[int], str]) -> str:
    """Describes a way out: its flags, bytes and price."""
    price = "no more work" if way.price < 0.0005 else f"about {way.price:.1%} of the step"
    return f"{way.flags}: {size_text(way.saved)} less, costs {price}"


def _changed(config: PretrainConfig, changes: Mapping[str, Mapping[str, Any]]) -> PretrainConfig:
    parts: dict[str, Any] = {}
    for name, values in changes.items():
        if name == "transformer":
            changed = dataclasses.replace(config.transformer, **values)
            parts["model"] = dataclasses.replace(config.model, transformer=changed)
        else:
            parts[name] = dataclasses.replace(getattr(config, name), **values)
    return dataclasses.replace(config, **parts)


def _candidates(config: PretrainConfig) -> Iterator[_Candidate]:
    yield from _of_state(config)
    yield from _of_activations(config)
    micro_batch = config.training.micro_batch_size
    if micro_batch % 2 == 0:
        smaller = {"training": {"micro_batch_size": micro_batch // 2}}
        yield _Candidate(f"--micro-batch-size {micro_batch // 2}", 0.0, smaller)


def _of_state(config: PretrainConfig) -> Iterator[_Candidate]:
    """Yields ways to take less for weights, gradients and optimizer."""
    transformer, optimizer, grid = config.transformer, config.optimizer, config.grid
    seconds = _seconds_of_step(config)
    shard = grid.tensor * grid.pipeline
    weights = _parameters(transformer) / shard
    strategy = sharding_strategy_of(config.ddp)
    sharded = strategy.shards_state
    if grid.data * grid.context > 1 and not sharded:
        on = {"use_distributed_optimizer": True}
        yield _Candidate("--use-distributed-optimizer", 0.0, {"ddp": on, "optimizer": on})
    if grid.data * grid.context > 1 and strategy is not ShardingStrategy.PARAMETERS:
        ddp = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
        both = {"use_distributed_optimizer": True}
        rate = _WITHIN_NODE if config.world_size <= _NODE else _BETWEEN_NODES
        micro_batches = config.training.global_batch_size // (config.training.micro_batch_size * grid.data)
        gathered = 2 * 2 * weights * max(micro_batches, 1)
        yield _Candidate(
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
            gathered / rate / seconds,
            {"ddp": ddp | both, "optimizer": both},
        )
    if transformer.bf16 and not optimizer.use_precision_aware_optimizer and optimizer.optimizer == "adam":
        aware = {"use_precision_aware_optimizer": True}
        named = "" if sharded else "--use-distributed-optimizer "
        on = {"use_distributed_optimizer": True}
        yield _Candidate(f"{named}--use-precision-aware-optimizer", 0.0, {"ddp": on, "optimizer": on | aware})
    if not optimizer.optimizer_cpu_offload and optimizer.optimizer == "adam" and optimizer.ema_decay is None:
        moved = 6 * weights / (grid.data * grid.context if sharded else 1)
        yield _Candidate(
            "--optimizer-cpu-offload --optimizer-offload-fraction 1.0",
            moved / _TO_HOST / seconds,
            {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}},
        )


def _of_activations(config: PretrainConfig) -> Iterator[_Candidate]:
    """Yields ways to keep less for backward."""
    transformer = config.transformer
    layers, head = _costs(config)
    step = 3 * (layers + head)
    if transformer.loss_chunk_size is None:
        yield _Candidate("--loss-chunk-size 1024", head / step, {"transformer": {"loss_chunk_size": 1024}})
    if transformer.recompute_granularity == "full":
        return
    experts = transformer.num_moe_experts is not None
    own = transformer.recompute_modules or [] if transformer.recompute_granularity == "selective" else []
    act = "moe_act" if experts else "mlp_act"
    for modules in (["layernorm"], ["layernorm", act]):
        names = [*own, *(name for name in modules if name not in own)]
        if names != own:
            chosen = {"recompute_granularity": "selective", "recompute_modules": names}
            yield _Candidate(
                f"--recompute-granularity selective --recompute-modules {' '.join(names)}",
                _bytes_again(transformer, modules) / _BYTES / (2 * step / _OPERATIONS),
                {"transformer": chosen},
            )
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    yield _Candidate(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        layers / step,
        {"transformer": full | {"recompute_modules": None}},
    )


# ---------------------------------------------------------------------------------------------------------------------
# Costs


def _costs(config: PretrainConfig) -> tuple[int, int]:
    """Returns the multiplications of the layers, and of the head, for one token."""
    transformer, length = config.transformer, config.data.seq_length
    assert length is not None
    numbers = range(1, transformer.num_layers + 1)
    layers = sum(layer_cost(transformer, number, length, config.is_bidirectional) for number in numbers)
    return layers, transformer.hidden_size * (config.tokenizer.vocab_size or 0)


def _parameters(transformer: TransformerConfig) -> int:
    """Returns about the number of parameters of the layers: the multiplications of a token without attention scores,
    with all experts."""
    numbers = range(1, transformer.num_layers + 1)
    chosen = transformer.num_moe_experts / transformer.moe_router_topk if transformer.num_moe_experts else 1.0
    return int(sum(layer_cost(transformer, number, 1) for number in numbers) * chosen)


def _seconds_of_step(config: PretrainConfig) -> float:
    tokens = config.training.global_batch_size * (config.data.seq_length or 0)
    return 6 * sum(_costs(config)) * tokens / config.world_size / _OPERATIONS


def _bytes_again(transformer: TransformerConfig, modules: list[str]) -> int:
    """Returns the bytes that all layers read and write once more for one token."""
    ffn = transformer.ffn_hidden_size or 0
    if transformer.num_moe_experts is not None:
        ffn = (transformer.moe_ffn_hidden_size or ffn) * transformer.moe_router_topk
    norms = 2 * 2 * transformer.hidden_size * ("layernorm" in modules)
    activation = 3 * ffn * (len(modules) > 1)
    return 2 * transformer.num_layers * (norms + activation)
