"""Which rank of a plan holds what, drawn: nodes and GPUs of one replica, and where the others are."""

from collections.abc import Iterator

from megatron.core.groups.rank_grid import RankGrid, ranks_text
from megatron.core.pipeline_parallel.stage_map import stage_map, stages_text
from megatron.training.config.pretrain_config import PretrainConfig

_MOST_NODES = 16
"""Nodes that are drawn one by one."""


def mapping_lines(config: PretrainConfig, gpus_per_node: int) -> Iterator[str]:
    """Yields the drawing. `config` has stages in place of the layout auto."""
    grid, nodes = config.grid, -(-config.world_size // gpus_per_node)
    yield (
        f"{config.world_size:,} ranks on {nodes:,} nodes of {gpus_per_node} GPUs: tensor {grid.tensor} x context "
        f"{grid.context} x pipeline {grid.pipeline} x data {grid.data}"
    )
    yield f"rank r is GPU r % {gpus_per_node} of node r // {gpus_per_node}"
    yield ""
    yield "pipeline stages"
    stages = stage_map(config.transformer)
    ranks_of: dict[int, list[int]] = {}
    for rank in range(grid.world_size):
        ranks_of.setdefault(grid.dense.coordinates(rank)["pp"], []).append(rank)
    for rank in range(grid.pipeline):
        chunks = tuple(stages.stage_at(rank, number) for number in range(stages.chunks))
        ranks = ranks_of[rank]
        yield f"  stage {rank}: {stages_text(chunks)}  (ranks {ranks_text(ranks)}; {_nodes_text(ranks, gpus_per_node)})"
    yield ""
    yield "nodes and GPUs"
    yield from _drawing(grid, nodes, gpus_per_node)
    yield ""
    yield from _groups(grid, gpus_per_node)


def _nodes_text(ranks: list[int], per_node: int) -> str:
    nodes = sorted({rank // per_node for rank in ranks})
    return f"node{'s' if len(nodes) > 1 else ''} {ranks_text(nodes)}"


def _drawing(grid: RankGrid, nodes: int, per_node: int) -> Iterator[str]:
    """Yields a box for each node; a cell is a GPU with the coordinates of its rank. Equal nodes in a row that differ in
    their data parallel rank only are counted, not drawn."""
    drawn, last, skipped = 0, "", 0
    for node in range(nodes):
        ranks = range(node * per_node, min((node + 1) * per_node, grid.world_size))
        places = [grid.coordinates(rank) for rank in ranks]
        shape = "|".join(" ".join(f"{axis}{place[axis]}" for axis in ("pp", "cp", "tp")) for place in places)
        if (shape == last or drawn >= _MOST_NODES) and node != nodes - 1:
            skipped += 1
            continue
        if skipped:
            yield f"  ... and {skipped} node{'s' * (skipped > 1)} alike, with the next ranks"
        cells = [_cell(grid, rank, place) for rank, place in zip(ranks, places, strict=True)]
        width = max(map(len, cells))
        line = "+" + "+".join("-" * (width + 2) for _ in cells) + "+"
        yield f"  node {node}"
        yield f"  {line}"
        yield "  |" + "|".join(f" {cell:<{width}} " for cell in cells) + "|"
        yield f"  {line}"
        drawn, last, skipped = drawn + 1, shape, 0


def _cell(grid: RankGrid, rank: int, place: dict[str, int]) -> str:
    """Returns the text of a GPU: rank, and its coordinates along all axes with several ranks."""
    axes = [axis for axis in ("tp", "cp", "dp", "pp", "ep") if grid.axis_size(axis) > 1]
    return " ".join([f"r{rank}", *(f"{axis}{place[axis]}" for axis in axes)])


def _groups(grid: RankGrid, per_node: int) -> Iterator[str]:
    """Yields the first group of each axis, and whether its ranks are on one node."""
    yield "groups that communicate"
    names = {
        "tp": "tensor, several times in each layer",
        "cp": "context, in each attention",
        "ep": "expert, twice in each layer with experts",
        "pp": "pipeline, once for each micro-batch and stage",
        "dp": "data, once a step",
    }
    for axis, what in names.items():
        if grid.axis_size(axis) == 1:
            continue
        group = grid.named_group(axis, 0)
        nodes = len({rank // per_node for rank in group})
        where = "within a node" if nodes == 1 else f"over {nodes} nodes"
        yield f"  {axis}  {len(group):>5} ranks, such as {ranks_text(group)}: {where} ({what})"
