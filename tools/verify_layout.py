"""Does a layout compute what one process does?   python tools/verify_layout.py -- FLAGS OF A RUN

    WORLD_SIZE=64 python tools/verify_layout.py -- --tensor-model-parallel-size 8 --sequence-parallel \
        --pipeline-model-parallel-size 4 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu ...

Makes the run small (the same kinds of layers, every dimension of the layout with two ranks or so, float64, made-up
data), trains it for a few steps under its layout and in one process, and compares initial weights, what every layer
gives for every token, gradients, norms and weights. If anything differs, says what was first: which layer or
parameter, and on which rank. Exit code 0: equal; 1: different; 2: it could not be run.

WORLD_SIZE says how many ranks the run has; without it, two replicas of the model. Data, checkpoint and logging flags
are left aside. On GPUs where there are enough, else on the CPU.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core.exceptions import UserError
from megatron.training.arguments import configure
from megatron.training.config.command_line import read_command_line
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.errors import exit_with_problems
from megatron.training.layout_check.differences import differences, report
from megatron.training.layout_check.layout_trace import LayoutTrace, record_layout_trace
from megatron.training.layout_check.shrink_run import flags_that_matter, shrink_run
from megatron.training.providers import Providers

PROVIDERS = Providers(pretrain_gpt.build_model, pretrain_gpt.build_datasets, pretrain_gpt.build_forward_step)


def main(words: Sequence[str]) -> int:
    own, flags = _split(words)
    options = _read(own)
    try:
        config = config_of(flags)
        small = shrink_run(config, options.processes, options.steps)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for note in small.notes:
                print(note)
            print(f"{options.steps} steps in {small.sizes.ranks} processes ({small.sizes}), then in one", flush=True)
            ranks = run(small.words, small.sizes.ranks, options.steps, folder / "layout")
            (alone,) = run(small.plain_words, 1, options.steps, folder / "one")
    except UserError as error:
        exit_with_problems(error)
    found = differences(alone, ranks, options.tolerance)
    axes = configure(small.words, launch_environment=LaunchEnvironment(small.sizes.ranks, False)).grid.dense
    coordinates = {rank: axes.coordinates(rank) for rank in range(small.sizes.ranks)}
    print(*report(found, coordinates, len(alone.found), options.tolerance), sep="\n", flush=True)
    return 1 if found else 0


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and the run's, which come after `--`."""
    if "--" not in words:
        return list(words), []
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def _read(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="verify_layout.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=8, help="how many processes the layout may have (8)")
    parser.add_argument("--steps", type=int, default=3, help="training steps (3)")
    parser.add_argument("--tolerance", type=float, default=1e-9, help="error over the largest value (1e-9)")
    return parser.parse_args(words)


def config_of(flags: Sequence[str]) -> PretrainConfig:
    """The run that the user means. Raises ConfigurationError with everything that is wrong with it."""
    launch_environment, words = LaunchEnvironment.of_this_process(), flags_that_matter(flags)
    world_size = launch_environment.world_size
    if not launch_environment.world_size_is_given:
        values = read_command_line(words).values
        sizes = (f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
        world_size = 2 * math.prod(max(1, int(values[name])) for name in sizes)
    return configure(words, launch_environment=LaunchEnvironment(world_size, launch_environment.has_cuda))


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def run(words: Sequence[str], world_size: int, steps: int, folder: Path) -> list[LayoutTrace]:
    """What each rank of a run sees. Raises UserError with the end of a rank's output where one fails."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"words": list(words), "steps": steps}))
    # Where the ranks meet is kept here, as torchrun does, at a port that is free and stays ours.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment = {**os.environ, **meeting, "WORLD_SIZE": str(world_size)}
    if torch.cuda.device_count() < world_size:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--as-rank", str(folder)]
    with contextlib.ExitStack() as files:
        processes = []
        for rank in range(world_size):
            output = files.enter_context((folder / f"rank_{rank}.txt").open("wb"))
            mine = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=mine, stdout=output, stderr=subprocess.STDOUT))
        try:
            _wait(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [LayoutTrace.load(folder / f"rank_{rank}.safetensors") for rank in range(world_size)]


def _wait(processes: Sequence["subprocess.Popen[bytes]"], folder: Path) -> None:
    waiting = dict(enumerate(processes))
    while waiting:
        for rank, process in list(waiting.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(timeout=0.1):
                    end = (folder / f"rank_{rank}.txt").read_text(errors="replace")[-3000:]
                    raise UserError(f"rank {rank} of {len(processes)} failed:\n{end}")
                del waiting[rank]


def as_rank(folder: Path) -> None:
    """One of the processes: watch the run and write down what was seen."""
    told = json.loads((folder / "run.json").read_text())
    rank = int(os.environ["RANK"])
    try:
        trace = record_layout_trace(configure(told["words"]), PROVIDERS, told["steps"])
    except UserError as error:
        exit_with_problems(error)
    trace.save(folder / f"rank_{rank}.safetensors")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(Path(sys.argv[2]))
    else:
        raise SystemExit(main(sys.argv[1:]))
