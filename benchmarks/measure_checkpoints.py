"""Measures saves and loads of a whole run on several ranks. Prints rows of a table for docs/benchmarks.md:

    torchrun --nproc_per_node 4 benchmarks/measure_checkpoints.py LLAMA8B --global-batch-size 4 --folder /scratch \\
        --layout="--use-distributed-optimizer" --layout="--tensor-model-parallel-size 4 --sequence-parallel"

Trains one step of a model of bench_cells.py in the first layout, saves its state (weights and optimizer), saves
it as --async-save does, and loads the checkpoint into every layout. All other flags are those of the runs. The folder
needs room for one checkpoint: 14 bytes a parameter with bf16 and Adam. Loads come from the page cache and, after the
system was asked to forget the files, from the disk. Sums of all bits show that every load brings back what was saved.
"""

import gc
import itertools
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch
import torch.distributed as dist

import pretrain_gpt
from benchmarks.bench import build_datasets, read_options
from benchmarks.bench_checkpoints import write_plainly
from benchmarks.measuring import after_one_step, parser_of
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.planning import assign_writes
from megatron.core.dist_checkpointing.reading import load
from megatron.core.exceptions import UserError
from megatron.core.utils.rendezvous import start_torch_distributed
from megatron.training.arguments import configure
from megatron.training.launch.errors import exit_with_problems
from megatron.training.providers import Providers
from megatron.training.state import optimizer_chunks_to_load, weight_chunks
from megatron.training.trainer import Trainer

PROVIDERS = Providers(pretrain_gpt.build_model, build_datasets, pretrain_gpt.build_forward_step)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Measurement:
    """Rows of the table, and what is compared."""

    folder: Path
    plain_bytes: int
    """Bytes that each rank writes to measure the disk."""
    nbytes: int = 0
    """Bytes of the saved state."""
    bits: int = 0
    """Sum of all saved bits, as integers."""
    rows: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = RankCoordinator()

    def time(self, action: Callable[[], object]) -> float:
        """Returns the seconds that an action takes, until all ranks and GPUs have done it."""
        self._wait()
        started = time.perf_counter()
        action()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ranks.gather(None)

    def add(self, what: str, seconds: float, nbytes: int | None = None) -> None:
        """Adds a row about `nbytes` bytes, those of the whole state by default."""
        rate = (self.nbytes if nbytes is None else nbytes) / 1e9 / seconds
        self.rows.append(f"| {what} | {rate:.2f} GB/s ({seconds:.2f} s) |")


def state_chunks(trainer: Trainer) -> list[Chunk]:
    """Returns all chunks of a run's checkpoints on this rank."""
    weights = weight_chunks(trainer.model, trainer.environment.groups)
    return [*weights, *trainer.optimizer.state_chunks()]


def bits_of(trainer: Trainer, ranks: RankCoordinator) -> int:
    """Returns the sum of the bits of a state, as integers; every element counts once, in every layout."""
    mine = assign_writes(state_chunks(trainer), ranks.global_rank)
    values = (chunk.values() for chunk in mine)
    return sum(ranks.gather(sum(int(v.view(_BITS[v.element_size()]).sum(dtype=torch.int64)) for v in values)))


def forget(folder: Path, ranks: RankCoordinator) -> None:
    """Asks the system to drop the files of a folder from the page cache."""
    if ranks.rank == 0 and hasattr(os, "posix_fadvise"):
        for path in (path for path in folder.rglob("*") if path.is_file()):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
    ranks.gather(None)


def measure_saves(trainer: Trainer, found: Measurement) -> None:
    """Adds the rows of saving. Leaves one checkpoint in the folder."""
    ranks, checkpoints = found.ranks, trainer.checkpoints
    mine = assign_writes(state_chunks(trainer), ranks.global_rank)
    found.nbytes = sum(ranks.gather(sum(chunk.tensor.nbytes for chunk in mine)))
    found.bits = bits_of(trainer, ranks)
    plain = found.folder / f"plain-{ranks.rank}"
    seconds = found.time(lambda: write_plainly(plain, found.plain_bytes))
    plain.unlink()
    written = found.plain_bytes * ranks.size
    found.add(f"plain write and sync of {written / 1e9:.2g} GB by {ranks.size} ranks", seconds, written)
    synchronous = found.time(lambda: checkpoints.save(trainer.saved_parts))
    found.add(f"save of {found.nbytes / 1e9:.4g} GB by {ranks.size} ranks", synchronous)
    if ranks.rank == 0:
        shutil.rmtree(found.folder / "run")
    first = found.time(lambda: checkpoints.memory.copy(mine))
    found.add("first copy to host memory, with its allocation", first)
    pause = found.time(lambda: checkpoints.begin_save(trainer.saved_parts))
    found.add(f"pause of an asynchronous save, {pause / synchronous:.1%} of the save", pause)
    found.add("the same save, from then on until it is complete", found.time(checkpoints.finish_save))


def measure_load(trainer: Trainer, found: Measurement, layout: str) -> None:
    """Adds the rows of loading, from the page cache and from the disk. Raises UserError if a value differs."""
    for source in ("the page cache", "the disk"):
        chunks = state_chunks(trainer)
        for chunk in assign_writes(chunks, found.ranks.global_rank):
            if chunk.encoded is None:
                chunk.tensor.zero_()
        if source == "the disk":
            forget(found.folder, found.ranks)
        wanted = itertools.chain(
            weight_chunks(trainer.model, trainer.environment.groups), optimizer_chunks_to_load(trainer.optimizer, True)
        )
        seconds = found.time(lambda: load(found.folder / "run", wanted, log=lambda line: None))  # noqa: B023
        found.add(f"load from {source} into {layout}", seconds)
        if bits_of(trainer, found.ranks) != found.bits:
            raise UserError(f"the state loaded into {layout} is not the one that was saved")


def run_in_layout(flags: Sequence[str], found: Measurement, layout: str) -> None:
    """Sets a run up, trains a step, and measures the loads; the first run also measures the saves."""
    config = configure([*flags, "--save", str(found.folder / "run")])
    with after_one_step(config, PROVIDERS) as trainer:
        if not found.rows:
            measure_saves(trainer, found)
        measure_load(trainer, found, layout)
    del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(words: Sequence[str] | None = None) -> int:
    """Runs the tool on this rank and returns its exit code."""
    parser = parser_of(__doc__)
    parser.usage = "%(prog)s CELL [options] [flags of pretrain_gpt.py]"
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument(
        "--layout",
        action="append",
        required=True,
        metavar="FLAGS",
        help='flags of a layout as one word: --layout="..."; the first one saves, each loads',
    )
    parser.add_argument("--plain-gigabytes", type=float, default=1.0, help="size of each rank's plain write (1)")
    args, rest = parser.parse_known_args(sys.argv[1:] if words is None else words)
    layouts = [read_options([*rest, *shlex.split(each), "--warmup", "1", "--steps", "1"])[1] for each in args.layout]
    start_torch_distributed()
    try:
        ranks = RankCoordinator()
        root = ranks.run_on_first(lambda: tempfile.mkdtemp(dir=args.folder))
        found = Measurement(Path(root), int(args.plain_gigabytes * 1e9))

        for layout, flags in zip(args.layout, layouts, strict=True):
            run_in_layout(flags, found, f"`{layout}`")
        if ranks.rank == 0:
            print("| what | measured |\n|---|---|", *found.rows, sep="\n", flush=True)
    except UserError as error:
        exit_with_problems(error)
    finally:
        if RankCoordinator().rank == 0 and "root" in locals():
            shutil.rmtree(root, ignore_errors=True)
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_main(main)
