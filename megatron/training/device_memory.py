"""Explains that a GPU has no memory left: what torch holds, what the run's state takes, which flags take less."""

import contextlib
import re
import threading
from collections.abc import Iterator

import torch

from megatron.core.distributed.sharding_strategy import ShardingStrategy, sharding_strategy_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.dry_run.rank_memory import build_shard, memory_of_shard
from megatron.training.dry_run.report import short_size
from megatron.training.launch.environment import Environment
from megatron.training.providers import Providers
from megatron.training.setup.set_up import resolve_auto_layout, vocabulary_rows
from megatron.training.tokenizer.build import build_tokenizer

_SECONDS = 10.0
"""Time for the estimate of the state. The other ranks learn of the failure only afterwards."""


@contextlib.contextmanager
def explains_lack_of_gpu_memory(
    config: PretrainConfig, providers: Providers, environment: Environment
) -> Iterator[None]:
    """Replaces the text of torch's error for a full GPU by that of `lack_of_gpu_memory`. The error keeps its class and
    traceback, so the exit code is the same."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        with contextlib.suppress(Exception):  # a second failure must not hide the first
            error.args = (lack_of_gpu_memory(str(error), config, providers, environment),)
        raise


def lack_of_gpu_memory(
    text_of_torch: str, config: PretrainConfig, providers: Providers, environment: Environment
) -> str:
    """Returns one sentence about a full GPU. `text_of_torch` says how much was asked for."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text_of_torch)
    parts = ["out of GPU memory" + (f": no room for {asked[1]}" if asked else "")]
    if environment.device.type == "cuda":
        parts.append(_allocations(environment.device))
    state = _state_bytes(config, providers, environment.rank)
    if state is not None:
        parts.append(
            f"weights, gradients and optimizer state of this rank take {short_size(state)} (--dry-run), activations "
            "are extra"
        )
    return "; ".join([*parts, f"to take less: {', '.join(ways_to_take_less(config))}"])


def _allocations(device: torch.device) -> str:
    allocated, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    total = torch.cuda.get_device_properties(device).total_memory
    return (
        f"torch has allocated {short_size(allocated)} of {short_size(total)} (at most {short_size(most)} so far) and "
        f"keeps {short_size(unused)} in free pieces (if that is much: PYTORCH_ALLOC_CONF=expandable_segments:True)"
    )


def _state_bytes(config: PretrainConfig, providers: Providers, rank: int) -> int | None:
    """Returns what --dry-run prints for this rank; None if that fails or takes too long: a script's model provider may
    wait for other ranks."""
    found: list[int] = []

    def estimate() -> None:
        with contextlib.suppress(Exception):
            tokenizer = build_tokenizer(config.tokenizer)
            rows = vocabulary_rows(config, tokenizer)
            resolved, _ = resolve_auto_layout(config, rows)
            found.append(memory_of_shard(build_shard(resolved, providers, tokenizer, rows, rank), resolved).total)

    thread = threading.Thread(target=estimate, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return found[0] if found else None


def ways_to_take_less(config: PretrainConfig) -> list[str]:
    """Returns flags that this run does not use yet and with which a rank needs less memory."""
    transformer, grid, found = config.transformer, config.grid, []
    if grid.data * grid.context > 1:
        strategy = sharding_strategy_of(config.ddp)
        if not strategy.shards_state:
            found.append("--use-distributed-optimizer")
        if strategy is not ShardingStrategy.PARAMETERS:
            found.append("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params")
    if transformer.recompute_granularity != "full":
        found.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if config.training.micro_batch_size > 1:
        found.append("--micro-batch-size 1")
    if transformer.loss_chunk_size is None:
        found.append("--loss-chunk-size 1024")
    sizes = f"--tensor-model-parallel-size above {grid.tensor}", f"--pipeline-model-parallel-size above {grid.pipeline}"
    return [*found, *sizes]
