"""Estimates the peak memory of a cell of compare.sh, without a GPU:   python benchmarks/peak_memory.py LLAMA8B/dp4

The state (weights, quantised weights, gradients, optimizer) is that of `--dry-run`, which builds each rank's part of
the model. Activations are counted per token and layer: what the layers of Llama's and MOE64's kind keep for backward.
tests/benchmarks/test_layouts.py compares the estimate with measured peaks.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pretrain_gpt
from benchmarks.bench import build_datasets, read_options
from benchmarks.layouts import find_cell
from megatron.core.pipeline_parallel.orders import Schedule, schedule_name
from megatron.core.pipeline_parallel.simulator import simulate
from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.diagnosis.dry_run.dry_run import dry_run
from megatron.diagnosis.dry_run.rank_memory import RankMemory
from megatron.training.arguments import configure
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.providers import Providers

H200 = 139 * 2**30
"""Bytes of an H200 that its driver reports as 139 GiB."""
OTHER_BYTES = int(4.5e9)
"""Logits of a part of the tokens, attention's scratch memory, what the allocator cannot use, communication buffers."""
_UNEVEN = 1.5
"""Rows of the rank with the busiest experts, divided by the mean."""


def configured(name: str) -> PretrainConfig:
    """Returns the config of our side of a cell, on as many GPUs as it needs. Raises ConfigurationError."""
    cell = find_cell(name)
    _, flags = read_options([cell.model, *cell.ours.split()])
    return configure(flags, launch_environment=LaunchEnvironment(cell.layout.gpus, has_cuda=True))


def peak_memory(config: PretrainConfig) -> int:
    """Estimates the largest number of bytes that a rank of a run holds at one time."""
    run = dry_run(config, Providers(pretrain_gpt.build_model, build_datasets, pretrain_gpt.build_forward_step))
    transformer = run.config.transformer
    batches = BatchSchedule.from_config(config.training, config.grid.data, config.data.seq_length)
    pipeline = pipeline_of(transformer)
    schedule = Schedule(
        schedule_name(transformer.pipeline_schedule, pipeline), pipeline, batches.final_num_microbatches
    )
    timeline = simulate(schedule)
    assert config.data.seq_length is not None
    tokens = config.data.seq_length * config.training.micro_batch_size
    tokens //= transformer.context_parallel_size * transformer.tensor_model_parallel_size
    first = {rank.place["pp"]: rank for rank in reversed(run.ranks)}
    overlapped = 1 if transformer.overlap_moe_expert_parallel_comm else 0
    return (
        max(
            rank.memory.total
            + int(
                tokens * bytes_of_token(transformer) * layers_of(rank) * (timeline.peak_activations(place) + overlapped)
            )
            + tokens * bytes_of_deferred_logits(config, rank)
            for place, rank in first.items()
        )
        + OTHER_BYTES
    )


def layers_of(rank: RankMemory) -> int:
    """Returns the number of layers of a rank."""
    return sum(len(stage.layers) for stage in rank.shard.stages)


def bytes_of_deferred_logits(config: PretrainConfig, rank: RankMemory) -> int:
    """Returns the bytes of the logits' gradients that a rank keeps for each token of a micro-batch until it computes
    the head's weight gradient, in 16 bits."""
    defers = config.transformer.pipeline_schedule in ("zb-h1", "zb-v")
    return 2 * (config.tokenizer.vocab_size or 0) if defers and any(s.loss for s in rank.shard.stages) else 0


def bytes_of_token(config: TransformerConfig) -> float:
    """Returns the bytes that a layer keeps for backward of one token, over all tensor parallel ranks, in 16 bits."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    groups, width = config.num_query_groups or heads, config.kv_channels or hidden // heads
    norms = 0 if "layernorm" in (config.recompute_modules or ()) and config.recompute_granularity else 2
    attention = (2 * heads + 2 * groups) * width  # queries, keys, values, and the output
    if config.num_moe_experts is None:
        mlp = 3.0 * (config.ffn_hidden_size or 0)
    else:
        ffn = config.moe_ffn_hidden_size or 0
        mlp = config.moe_router_topk * (hidden + 3.0 * ffn)
        mlp *= 1.0 if config.expert_model_parallel_size == 1 else _UNEVEN
    return 2.0 * ((2 + norms) * hidden + attention + mlp)


def main(words: Sequence[str] | None = None) -> int:
    """Prints the estimate of each cell; returns 1 if one does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="CELL")
    peaks = {name: peak_memory(configured(name)) for name in parser.parse_args(words).cells}
    for name, peak in peaks.items():
        print(f"{name}: about {peak / 1e9:.1f} GB, {peak / H200:.0%} of an H200")
    return int(max(peaks.values()) > H200)


if __name__ == "__main__":
    raise SystemExit(main())
