"""What is said about the machines of a run before it starts: groups of ranks across nodes, and the pipeline's bubble.

Tensor parallel groups across nodes are an error of the command line (`training.config.parallel_checks`). Here are the
warnings about other groups.
"""

import itertools
from collections.abc import Iterator, Sequence

from megatron.core.groups.rank_grid import RankGrid
from megatron.core.pipeline_parallel.schedules import schedule_of
from megatron.core.pipeline_parallel.simulator import Costs
from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.core.transformer.layer_patterns import layer_parts
from megatron.diagnosis.planning.exposed import bytes_of_keys, bytes_one_way, way_of_context
from megatron.diagnosis.planning.schedule_time import schedule_time
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment, gpus_of_node

LARGE_BUBBLE = 0.15
"""Fraction of the time from which on a bubble is worth a warning."""


def topology_lines(config: PretrainConfig, launch: LaunchEnvironment) -> Iterator[str]:
    """Yields warnings about groups of ranks that would be slow on the machines of a launch."""
    node = gpus_of_node(config.hardware.gpus_per_node, launch)
    grid, domain = config.grid, config.hardware.gpus_per_nvlink_domain or node
    if domain is None:
        if max(grid.tensor, grid.context, grid.expert) > 1:
            yield (
                "topology: the number of GPUs of a node is not known, so groups of ranks across nodes are not looked "
                "for; --gpus-per-node tells it"
            )
    elif config.world_size > domain:
        yield from _across_nodes(config, domain)
    yield from _bubble(config)


def _across_nodes(config: PretrainConfig, domain: int) -> Iterator[str]:
    grid, batches = config.grid, _micro_batches(config)
    context, experts = _widest(grid, "cp", domain), _widest(grid, "ep", domain)
    own = _own_layers(config)
    attends = [number for number in own if layer_parts(config.transformer, number).token_mixer is not None]
    if context and attends:
        # Keys and values in forward; in backward these again, and their gradients.
        sent = 3 * batches * len(attends) * bytes_of_keys(config) * (len(context) - 1)
        who = "the last GPU of each node"  # of a ring
        if way_of_context(config) != "p2p":
            who, sent = "each GPU", sent * _share_outside(context, domain)
        yield (
            f"topology: --context-parallel-size {grid.context}: ranks of one group are on several nodes, where "
            f"{domain} GPUs share NVLink; {who} sends about {_gigabytes(sent)} over the network in a step"
        )
    layers = [number for number in own if layer_parts(config.transformer, number).channel_mixer == "moe"]
    if experts and layers:
        sent = 4 * batches * len(layers) * bytes_one_way(config, len(experts)) * _share_outside(experts, domain)
        yield (
            f"topology: --expert-model-parallel-size {grid.expert}: ranks of one group are on several nodes, where "
            f"{domain} GPUs share NVLink; each GPU sends about {_gigabytes(sent)} over the network in a step"
        )


def _bubble(config: PretrainConfig) -> Iterator[str]:
    pipeline = pipeline_of(config.transformer)
    if pipeline.num_stages == 1:
        return
    batches = _micro_batches(config)
    schedule = schedule_of(config.transformer, pipeline, batches)
    bubble = schedule_time(schedule, [Costs()] * pipeline.num_stages).bubble
    if bubble > LARGE_BUBBLE:
        yield (
            f"topology: --pipeline-model-parallel-size {pipeline.pipeline_size}: with {batches} micro-batches of each "
            f"rank, ranks wait {bubble:.0%} of the time in the pipeline's bubble; a larger --global-batch-size, fewer "
            "stages, --num-virtual-stages-per-pipeline-rank or --pipeline-schedule zb-v make it smaller"
        )


def _micro_batches(config: PretrainConfig) -> int:
    assert config.data.seq_length is not None
    schedule = BatchSchedule.from_config(config.training, config.grid.data, config.data.seq_length)
    return schedule.final_num_microbatches


def _own_layers(config: PretrainConfig) -> Sequence[int]:
    """Returns the layers of a rank, as if all stages had equally many."""
    return range(1, -(-config.transformer.num_layers // config.grid.pipeline) + 1)


def _widest(grid: RankGrid, axis: str, domain: int) -> tuple[int, ...] | None:
    """Returns a group along an axis whose ranks are in several NVLink domains; None if there is none."""
    if grid.axis_size(axis) == 1:
        return None
    groups = grid.groups((axis,))
    return next((group for group in groups if group[0] // domain != group[-1] // domain), None)


def _share_outside(group: Sequence[int], domain: int) -> float:
    """Returns the part of the pairs of ranks of a group that are in different domains."""
    pairs = list(itertools.permutations(group, 2)) if len(group) <= 64 else None
    if pairs is None:
        return 1.0 - (domain - 1) / (len(group) - 1) if len(group) > domain else 1.0
    return sum(a // domain != b // domain for a, b in pairs) / len(pairs)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.3g} GB"
