"""Explains that a GPU has no memory left: what torch holds, what the run's state takes, which flags take less."""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.distributed.sharding_strategy import ShardingStrategy, sharding_strategy_of
from megatron.core.utils.gpu_memory import SAYS_NO_GPU_MEMORY, is_lack_of_gpu_memory
from megatron.data.tokenizer.build import build_tokenizer
from megatron.diagnosis.dry_run.report import short_size
from megatron.diagnosis.memory.peak import peak_of, peaks_of_ranks
from megatron.diagnosis.memory.rank_memory import build_shard, memory_of_shard
from megatron.diagnosis.memory.ways_out import WayOut, way_text, ways_out
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import Environment
from megatron.training.providers import Providers
from megatron.training.setup.sizes import resolve_auto_layout, vocabulary_rows

_SIZE = r"([\d.]+ (?:bytes|[KMG]iB))"
_SECONDS = 10.0
"""Time for the estimate of the state. The other ranks learn of the failure only afterwards."""


@contextlib.contextmanager
def explains_lack_of_gpu_memory(
    config: PretrainConfig, providers: Providers, environment: Environment
) -> Iterator[None]:
    """Replaces the text of an error for a full GPU by that of `lack_of_gpu_memory`. The error keeps its class and
    traceback, so the exit code is the same."""
    try:
        yield
    except RuntimeError as error:
        if is_lack_of_gpu_memory(error):
            with contextlib.suppress(Exception):  # a second failure must not hide the first
                error.args = (lack_of_gpu_memory(str(error), config, providers, environment),)
        raise


def lack_of_gpu_memory(text: str, config: PretrainConfig, providers: Providers, environment: Environment) -> str:
    """Returns one sentence about a full GPU. `text` is that of the error. Torch's says how much was asked for, and what
    was held then; other libraries only say that there was no memory."""
    asked = re.search(rf"Tried to allocate {_SIZE}", text)
    capacity = re.search(rf"total capacity of {_SIZE}", text)
    held = re.search(rf"{_SIZE} is allocated by PyTorch.*?, and {_SIZE} is reserved", text)
    parts = ["out of GPU memory" + (f": no room for {asked[1]}" if asked else "")]
    if capacity and held:
        parts.append(
            f"torch had allocated {held[1]} of {capacity[1]}, and kept {held[2]} in free pieces (if that is much: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True)"
        )
    elif not asked:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if SAYS_NO_GPU_MEMORY.search(line)), "")
        parts[0] += f" outside torch: {said}" if said else ""
    seen = _estimate(config, providers, environment.rank)
    total = None if capacity is None else int(_bytes_of(capacity[1]))
    if seen.state is not None:
        parts.append(
            f"weights, gradients and optimizer state of this rank take {short_size(seen.state)} (--dry-run)"
            + (", activations are extra" if seen.peak is None else f", and {short_size(seen.peak)} with activations")
        )
    if seen.ways:
        parts.append("to take less: " + "; ".join(way_text(way, short_size) for way in seen.ways))
    else:
        state_fits = seen.state is None or total is None or seen.state < total
        parts.append(f"to take less: {', '.join(ways_to_take_less(config, state_fits))}")
    return "; ".join(parts)


def _bytes_of(size: str) -> float:
    """Returns the number of bytes of a size in torch's words, such as 79.18 GiB."""
    number, unit = size.split()
    return float(number) * 1024 ** ("bKMG".index(unit[0]))


@dataclass
class _Estimate:
    """What --dry-run would print, as far as it was found in time."""

    state: int | None = None
    peak: int | None = None
    ways: Sequence[WayOut] = ()


def _estimate(config: PretrainConfig, providers: Providers, rank: int) -> _Estimate:
    """Returns what --dry-run prints for this rank, without parts that fail or take too long: a script's model provider
    may wait for other ranks."""
    found = _Estimate()

    def estimate() -> None:
        with contextlib.suppress(Exception):
            tokenizer = build_tokenizer(config.tokenizer)
            rows = vocabulary_rows(config, tokenizer)
            resolved, _ = resolve_auto_layout(config, rows)
            found.state = memory_of_shard(build_shard(resolved, providers, tokenizer, rows, rank), resolved).total
            peaks = peaks_of_ranks(resolved, providers, tokenizer)
            found.peak = peaks[resolved.grid.coordinates(rank)["pp"]].allocated
            found.ways = ways_out(resolved, lambda changed: peak_of(changed, providers, tokenizer))

    thread = threading.Thread(target=estimate, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return dataclasses.replace(found)


def ways_to_take_less(config: PretrainConfig, state_fits: bool = True) -> list[str]:
    """Returns flags that this run does not use yet and with which a rank needs less memory. If the state alone does not
    fit, less memory for activations does not help."""
    transformer, grid, found = config.transformer, config.grid, []
    if grid.data * grid.context > 1:
        strategy = sharding_strategy_of(config.ddp)
        if not strategy.shards_state:
            found.append("--use-distributed-optimizer")
        if strategy is not ShardingStrategy.PARAMETERS:
            found.append("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params")
    if state_fits and transformer.recompute_granularity != "full":
        found.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if state_fits and config.training.micro_batch_size > 1:
        found.append("--micro-batch-size 1")
    if state_fits and transformer.loss_chunk_size is None:
        found.append("--loss-chunk-size 1024")
    if transformer.bf16 and not config.optimizer.use_precision_aware_optimizer:
        found.append("--use-precision-aware-optimizer")
    if not config.optimizer.optimizer_cpu_offload:
        found.append("--optimizer-cpu-offload --optimizer-offload-fraction 1.0")
    sizes = f"--tensor-model-parallel-size above {grid.tensor}", f"--pipeline-model-parallel-size above {grid.pipeline}"
    return [*found, *sizes]
