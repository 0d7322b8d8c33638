"""Measures how fast checkpoints are saved and loaded. Prints rows of a table for docs/benchmarks.md.

python benchmarks/bench_checkpoints.py --folder /scratch --gigabytes 4 --device cuda

It also measures the speed of the folder itself: one plain stream of bytes, written and synced.
"""

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch

from benchmarks.measuring import parser_of
from megatron.core.dist_checkpointing.async_saving import PendingSave, StagingMemory, begin_save
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.writing import save
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

_BLOCK = 16 << 20
_SMALL_TENSORS = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where the tensors are (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure(Path(folder), int(args.gigabytes * 1e9), args.device)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(folder: Path, nbytes: int, device: str) -> None:
    """Prints the table for a checkpoint of this size in this folder."""
    chunks = make_chunks(nbytes, device)
    total = sum(chunk.flat.nbytes for chunk in chunks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("| what | measured |\n|---|---|")
    row(f"plain write and sync of {total / 1e9:.2g} GB", total, lambda: write_plainly(folder / "plain", total))
    row("save", total, lambda: save(folder, chunks, step=1, common={}, config={}, layout={}))
    row(f"load, from the page cache, into {device} memory", total, lambda: load(folder, chunks))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    print(f"| host memory beyond the tensors | {grown:.0f} MiB |")
    memory = StagingMemory()
    begin_save(folder, chunks, memory, step=2, common={}, config={}, layout={}).finish()  # which keeps the memory
    pending: list[PendingSave] = []

    def begin() -> None:
        pending.append(begin_save(folder, chunks, memory, step=3, common={}, config={}, layout={}))

    row("pause of an asynchronous save, from the second one on", total, begin)
    row("the same save, until it is complete", total, pending[0].finish)


def make_chunks(nbytes: int, device: str) -> list[Chunk]:
    """Returns sixteen equal tensors and a thousand small ones, which stand for norms and biases."""
    shapes = [(nbytes // 4 // 16,)] * 16 + [(256,)] * _SMALL_TENSORS
    tensors = (torch.full(shape, 0.5, device=device) for shape in shapes)
    return [Chunk(f"t{i}", tuple(t.shape), Box.whole(tuple(t.shape)), None, t) for i, t in enumerate(tensors)]


def write_plainly(path: Path, nbytes: int) -> None:
    """Writes a file of zeros in large blocks, and syncs it."""
    disk, block = Disk(), memoryview(bytes(_BLOCK))
    with disk.create(path) as file:
        for begin in range(0, nbytes, _BLOCK):
            disk.write(file, block[: nbytes - begin])
        disk.sync(file)


def row(what: str, nbytes: int, action: Callable[[], object]) -> None:
    """Times an action that moves `nbytes` bytes, and prints its row."""
    started = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    print(f"| {what} | {nbytes / 1e6 / seconds:.0f} MB/s ({seconds:.2f} s) |", flush=True)


if __name__ == "__main__":
    run_main(main)
