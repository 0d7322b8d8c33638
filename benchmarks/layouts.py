"""The layouts that compare.sh measures: flags of this project, flags of the anchor, number of GPUs.

python benchmarks/layouts.py LLAMA8B/dp4            # the cell as assignments of shell variables
python benchmarks/layouts.py --gpus 4 --budget 540  # the cells of four GPUs that still need a row

Both sides of a cell train the same model on batches of the same size.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_DATA = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_TENSOR = "--tensor-model-parallel-size {} --sequence-parallel --use-distributed-optimizer"
_PIECES = "--tp-comm-overlap --tp-comm-overlap-rs-dgrad"
_GRAPHS = "--micro-batch-size 1 --global-batch-size 16 --cuda-graph-impl local"
_CHUNKS = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
_ZERO3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
_BOTH = "--overlap-grad-reduce --overlap-param-gather"
_FLEX = "--moe-token-dispatcher-type flex"
_ANCHOR_OVERLAP = "--overlap-moe-expert-parallel-comm"
_DELAYED = "--delay-wgrad-compute"
_GATHERED = f"--moe-token-dispatcher-type allgather {_DELAYED}"
_WIDE = "--micro-batch-size 8"
_FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
_FSDP_OF_ANCHOR = (
    f"{_ZERO3} {_BOTH} --use-distributed-optimizer --no-gradient-accumulation-fusion --calculate-per-token-loss "
    "--init-model-with-meta-device --ckpt-format fsdp_dtensor"
)


@dataclass(frozen=True)
class Layout:
    """Flags of both sides, beside those of the model."""

    gpus: int
    ours: str
    anchor: str | None = None
    """None: our flags."""
    reference: str | None = None
    """Layout that the anchor runs instead, because it has no such flags; None: this one."""
    connections: int = 1
    """CUDA_DEVICE_MAX_CONNECTIONS of the anchor. Its FSDP and overlapped experts refuse 1."""


def _data_parallel(gpus: int) -> Layout:
    return Layout(gpus, _DATA)


def _tensor_parallel(gpus: int, tensor: int, more: str = "") -> Layout:
    flags = " ".join(filter(None, (_TENSOR.format(tensor), more)))
    return Layout(gpus, f"{flags} {_PIECES}", flags)


def _expert_parallel(gpus: int, ours: str = "", anchor: str | None = None, **more: Any) -> Layout:
    flags = f"--expert-model-parallel-size {gpus} {_DATA}"
    theirs = None if anchor is None else f"{flags} {anchor}".strip()
    return Layout(gpus, f"{flags} {ours}".strip(), theirs, **more)


def _expert_layouts(gpus: int) -> dict[str, Layout]:
    """Ways to exchange tokens. The anchor's flex dispatcher needs DeepEP, so it stands beside ours with alltoall. With
    `-overlap` the anchor hides the exchange behind another micro-batch, and we hide it behind weight gradients."""
    plain = f"ep{gpus}"
    return {
        plain: _expert_parallel(gpus),
        f"{plain}-flex": _expert_parallel(gpus, _FLEX, reference=plain),
        f"{plain}-allgather": _expert_parallel(gpus, _GATHERED, reference=plain),
        f"{plain}-overlap": _expert_parallel(gpus, _DELAYED, _ANCHOR_OVERLAP, connections=32),
        f"{plain}-flex-overlap": _expert_parallel(gpus, f"{_FLEX} {_DELAYED}", reference=f"{plain}-overlap"),
    }


def _chunked(gpus: int, **more: Any) -> dict[str, Layout]:
    """Returns flags for two chunks per rank: ours have equal cost, the anchor's have equal numbers of layers."""
    return {
        "pp4": Layout(gpus, f"{_CHUNKS} --pipeline-model-parallel-layout auto", _CHUNKS),
        "pp4-zbv": Layout(
            gpus,
            "--pipeline-model-parallel-size 4 --pipeline-schedule zb-v --pipeline-model-parallel-layout auto",
            reference="pp4",
        ),
    }


LAYOUTS: Mapping[str, Layout] = {
    "graphs": Layout(
        1,
        _GRAPHS,
        f"{_GRAPHS} --te-rng-tracker --no-check-for-nan-in-loss-and-grad",
    ),
    **{f"dp{gpus}": _data_parallel(gpus) for gpus in (2, 4)},
    **{f"tp{gpus}": _tensor_parallel(gpus, gpus) for gpus in (2, 4)},
    "tp2dp2": _tensor_parallel(4, 2, _BOTH),
    "tp4dp2": _tensor_parallel(8, 4, _BOTH),
    "pp2": Layout(
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout auto "
        "--micro-batch-size 2",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
    ),
    **_chunked(4),
    "pp4tp2": Layout(
        8,
        f"{_TENSOR.format(2)} {_PIECES} {_CHUNKS} --pipeline-model-parallel-layout auto",
        f"{_TENSOR.format(2)} {_CHUNKS}",
    ),
    **{f"cp{gpus}": Layout(gpus, f"--context-parallel-size {gpus} {_DATA}") for gpus in (2, 4, 8)},
    **{name: layout for gpus in (2, 4, 8) for name, layout in _expert_layouts(gpus).items()},
    "mb8": Layout(1, _WIDE),
    "ep2-mb8": _expert_parallel(2, f"{_GATHERED} {_WIDE}", _WIDE),
    "zero3": Layout(4, f"{_ZERO3} {_BOTH}", reference="dp4"),
    "hsdp": Layout(
        8,
        f"{_ZERO3} {_BOTH} --num-distributed-optimizer-instances 2",
        f"{_FSDP_OF_ANCHOR} --num-distributed-optimizer-instances 2",
        connections=8,
    ),
}
"""Layouts by name. A name may be followed by `-fp8` and by `-8mb`, as in `pp4-8mb`: eight micro-batches a step."""


@dataclass(frozen=True)
class Cell:
    """A model in a layout, as compare.sh measures it."""

    name: str
    model: str
    layout: Layout
    batch: str = ""
    """Flags of both sides: length of a sequence, batch, number of layers."""
    step_seconds: float = 1.0
    """Estimate of the slower side's step, for planning a time budget."""

    @property
    def reference(self) -> str:
        """Name of the cell that the anchor runs."""
        return self.name if self.layout.reference is None else f"{self.model}/{self.layout.reference}"

    @property
    def ours(self) -> str:
        """Flags of this project, after those of the model."""
        return f"{self.layout.ours} {self.batch}".strip()

    @property
    def anchor(self) -> str:
        """Flags of the anchor, after those of the model. Meaningless if another cell is the reference."""
        return f"{self.layout.ours if self.layout.anchor is None else self.layout.anchor} {self.batch}".strip()


_32K = "--seq-length 32768 --max-position-embeddings 32768 --global-batch-size 4"
_64K = "--seq-length 65536 --max-position-embeddings 65536 --global-batch-size 4"
_SIXTEEN_LAYERS = "--num-layers 16 --global-batch-size"
BATCHES: Mapping[str, tuple[str, float]] = {
    "LLAMA8B/dp4": ("--global-batch-size 32", 6.5),
    "LLAMA8B/dp4-fp8": ("--global-batch-size 32", 5.0),
    "LLAMA8B/zero3": ("--global-batch-size 32", 6.5),
    "LLAMA8B/tp4": ("--global-batch-size 16", 4.0),
    "LLAMA8B/tp2dp2": ("--global-batch-size 16", 3.7),
    "LLAMA8B/pp4": ("--global-batch-size 32", 7.5),
    "LLAMA8B/pp4-zbv": ("--global-batch-size 32", 7.5),
    "LLAMA8B/pp4-8mb": ("--global-batch-size 8", 2.3),
    "LLAMA8B/pp4-zbv-8mb": ("--global-batch-size 8", 2.3),
    "LLAMA8B/cp4": (_32K, 5.0),
    **{f"MOE64/ep4{way}": (f"{_SIXTEEN_LAYERS} 64", 2.3) for way in ("", "-flex", "-overlap", "-flex-overlap")},
    "LLAMA8B/hsdp": ("--global-batch-size 64", 7.0),
    "LLAMA8B/tp4dp2": ("--global-batch-size 32", 4.5),
    "LLAMA8B/pp4tp2": ("--global-batch-size 32", 4.5),
    "LLAMA8B/cp8": (_64K, 8.5),
    **{f"MOE64/ep8{way}": (f"{_SIXTEEN_LAYERS} 128", 2.8) for way in ("", "-flex", "-overlap", "-flex-overlap")},
}
"""Batch and estimated step of the cells of four and eight GPUs, in the order in which they are measured. Other cells
have the batch of their model."""

TINY = (
    "--num-layers 8 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 8 --num-query-groups 8 --kv-channels 4 "
    "--seq-length 32 --max-position-embeddings 32 --vocab-size 512 --micro-batch-size 1 --num-workers 0"
)
"""Sizes that make every dense model tiny, for rehearsals on CPUs."""
TINY_EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"

_START_SECONDS = 45.0
"""From the launch of one side to its first step."""


def find_cell(name: str) -> Cell:
    """Returns the cell of a name such as LLAMA1B, LLAMA1B/tp2 or LLAMA8B/dp4-fp8. Raises ValueError otherwise."""
    model, _, word = name.partition("/")
    batch, seconds = BATCHES.get(name, ("", 1.0))
    if not word:
        return Cell(name, model, Layout(1, ""), batch, seconds)
    bare = word.removesuffix("-fp8").removesuffix("-8mb")
    if bare not in LAYOUTS:
        raise ValueError(f"{name}: no layout {bare}; there are {', '.join(LAYOUTS)}")
    layout = LAYOUTS[bare]
    if word.endswith("-8mb") and layout.reference is not None:
        layout = replace(layout, reference=f"{layout.reference}-8mb")
    return Cell(name, model, layout, f"{batch} {_FP8}".strip() if word.endswith("-fp8") else batch, seconds)


def cells_of_gpus(gpus: int) -> list[Cell]:
    """Returns the cells of the table with this number of GPUs, in order."""
    return [cell for cell in map(find_cell, BATCHES) if cell.layout.gpus == gpus]


def pair_seconds(cell: Cell, steps: int, iterations: int, with_anchor: bool = True) -> float:
    """Estimates the seconds that both sides of a cell take, with `steps` of this project and `iterations` of the
    anchor."""
    anchor = _START_SECONDS + iterations * cell.step_seconds if with_anchor else 0.0
    return _START_SECONDS + steps * cell.step_seconds + anchor


def missing(cells: Iterable[Cell], rows: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Returns the cells without a row that has a timeline. Rows of earlier layouts have none."""
    measured = {f"{row['cell']}/{row['layout']}" for row in rows if row["ours"].get("timeline")}
    return [cell for cell in cells if cell.name not in measured]


def planned(cells: Sequence[Cell], budget: float, steps: int, iterations: int) -> list[Cell]:
    """Returns the cells, in order, that fit into a budget of seconds. A run of the anchor serves several cells."""
    chosen, measured = list[Cell](), set[str]()
    for cell in cells:
        seconds = pair_seconds(cell, steps, iterations, cell.reference not in measured)
        if seconds <= budget:
            budget -= seconds
            chosen.append(cell)
            measured.add(cell.reference)
    return chosen


def assignments(cell: Cell, tiny: bool = False) -> list[str]:
    """Returns the cell as assignments of shell variables; with `tiny` in sizes that suit a rehearsal."""
    reference = find_cell(cell.reference)
    ours, theirs = cell.ours, reference.anchor
    if tiny:
        sizes = f"{TINY} {TINY_EXPERTS}" if cell.model == "MOE64" else TINY
        sizes = f"{sizes} --global-batch-size {2 * cell.layout.gpus}"
        ours, theirs = f"{ours} {sizes}", f"{theirs} {sizes}"
    values = {
        "cell": cell.model,
        "gpus": cell.layout.gpus,
        "ours": ours,
        "reference": reference.name,
        "theirs": theirs,
        "connections": reference.layout.connections,
    }
    return [f"{name}={shlex.quote(str(value))}" for name, value in values.items()]


def main(words: Sequence[str] | None = None) -> int:
    """Prints a cell, or the names of the cells to measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", nargs="?", help="a model, or model/layout")
    parser.add_argument("--gpus", type=int, metavar="N", help="print the names of the cells of N GPUs")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="those that fit in it")
    parser.add_argument("--results", type=Path, metavar="FILE", help="leave out cells that have a row there")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps of this project, for the budget")
    parser.add_argument("--iterations", type=int, default=8, metavar="N", help="steps of the anchor, for the budget")
    parser.add_argument("--tiny", action="store_true", help="with a cell: tiny sizes, for rehearsals")
    args = parser.parse_args(words)
    if (args.cell is None) == (args.gpus is None):
        parser.error("give a cell or --gpus")
    try:
        if args.cell is not None:
            print(*assignments(find_cell(args.cell), args.tiny), sep="\n")
            return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    there = args.results is not None and args.results.exists()
    cells = missing(cells_of_gpus(args.gpus), json.loads(args.results.read_text()) if there else [])
    print(*(cell.name for cell in planned(cells, args.budget, args.steps, args.iterations)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
