"""Shows the process groups of a layout without starting any process: their sizes, their number, and communicators.

python tools/show_grid.py --world-size 16384 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
python tools/show_grid.py --world-size 64 --tensor-model-parallel-size 4 --rank 13

Groups with the same ranks share one communicator. The group of all ranks uses the one that every run has.
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.exceptions import UserError
from megatron.core.groups.rank_grid import (
    DEFAULT_ORDER,
    GROUP_AXES,
    RankGrid,
    first_and_last,
    first_only,
    hierarchical_groups,
    ranks_text,
)

Groups = dict[str, list[tuple[int, ...]]]


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    args = _parser().parse_args(argv)
    grid = RankGrid(
        args.world_size,
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        optimizer_instances=args.num_distributed_optimizer_instances,
    )
    groups = all_groups(grid, args.hierarchical_context_parallel_sizes)
    if args.rank is not None and not 0 <= args.rank < grid.world_size:
        raise UserError(f"--rank {args.rank}: the ranks are 0 to {grid.world_size - 1}")
    print("\n".join(group_lines(grid, groups) if args.rank is None else rank_lines(grid, groups, args.rank)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks of the run")
    for name in (
        "--tensor-model-parallel-size",
        "--context-parallel-size",
        "--pipeline-model-parallel-size",
        "--expert-model-parallel-size",
        "--num-distributed-optimizer-instances",
    ):
        parser.add_argument(name, type=int, default=1, metavar="N", help="as in pretrain_gpt.py")
    parser.add_argument("--expert-tensor-parallel-size", type=int, metavar="N", help="as in pretrain_gpt.py")
    parser.add_argument(
        "--hierarchical-context-parallel-sizes", type=int, nargs="+", metavar="N", help="as in pretrain_gpt.py"
    )
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true", help="as in pretrain_gpt.py")
    parser.add_argument("--rank", type=int, metavar="R", help="list the groups of this rank and their members")
    return parser


def all_groups(grid: RankGrid, hierarchical_sizes: Sequence[int] | None = None) -> Groups:
    """Returns all groups of a grid by name, including those of embeddings and of hierarchical context parallelism."""
    groups = {name: grid.named_groups(name) for name in GROUP_AXES}
    groups["embd"] = [tuple(first_and_last(pipeline)) for pipeline in groups["pp"]]
    groups["pos_embd"] = [tuple(first_only(pipeline)) for pipeline in groups["pp"]]
    if hierarchical_sizes is not None:
        levels = [hierarchical_groups(ranks, hierarchical_sizes) for ranks in groups["cp"]]
        for number, level in enumerate(zip(*levels, strict=True)):
            groups[f"hcp[{number}]"] = list(itertools.chain(*level))
    return groups


def communicators(grid: RankGrid, groups: Groups) -> set[tuple[int, ...]]:
    """Returns the sets of ranks that need a communicator: more than one rank, but not all ranks."""
    return {ranks for same in groups.values() for ranks in same if 1 < len(ranks) < grid.world_size}


def communicators_of_ranks(grid: RankGrid, groups: Groups) -> Counter[int]:
    """Returns the number of communicators of each rank, without that of the group of all ranks."""
    return Counter(itertools.chain.from_iterable(communicators(grid, groups)))


def group_lines(grid: RankGrid, groups: Groups) -> Iterator[str]:
    """Yields a line for each kind of group."""
    yield f"{grid.world_size:,} ranks, order {grid.order}: " + ", ".join(
        f"{name} {grid.axis_size(name)}" for name in ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
    )
    yield f"  {'group':<16} {'groups':>8} {'ranks each':>11}   first group"
    for name, same in groups.items():
        yield f"  {name:<16} {len(same):>8,} {len(same[0]):>11,}   {ranks_text(same[0])}"
    made = communicators(grid, groups)
    counts = sorted(set(communicators_of_ranks(grid, groups).values()) or {0})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    total = sum(map(len, groups.values()))
    yield f"{total:,} groups, {len(made):,} communicators, {each} per rank besides that of all ranks"


def rank_lines(grid: RankGrid, groups: Groups, rank: int) -> Iterator[str]:
    """Yields a line for each group of a rank."""
    yield f"rank {rank}: " + ", ".join(f"{name} {place}" for name, place in grid.coordinates(rank).items())
    for name, same in groups.items():
        for ranks in same:
            if rank in ranks:
                yield f"  {name:<16} {ranks_text(ranks)}"


if __name__ == "__main__":
    run_main(main)
