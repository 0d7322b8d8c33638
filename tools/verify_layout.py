"""Checks that a layout computes what one process computes:   python tools/verify_layout.py -- FLAGS OF A RUN

    WORLD_SIZE=64 python tools/verify_layout.py -- --tensor-model-parallel-size 8 --sequence-parallel \
        --pipeline-model-parallel-size 4 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu ...
    python tools/verify_layout.py --script examples/custom_model/pretrain_custom.py -- FLAGS OF A RUN

Shrinks the run (same kinds of layers, about two ranks for each dimension of the layout, float64, random data), trains
it for a few steps in its layout and in one process, and compares initial weights, the outputs of all layers for all
tokens, gradients, norms and weights. If anything differs, prints the first difference: layer or parameter, and rank.
Exit code 0: equal; 1: different; 2: the run failed.

--script names the script of your own model. The tool calls build_model, build_datasets and build_forward_step of that
script, or those that it lacks of the entry script that it imports as a module (import pretrain_gpt). It calls add_flags
if the script has its own flags, which are kept unchanged. Outputs of layers are compared for
GPTModel only.

WORLD_SIZE is the number of ranks of the run; without it, the run has two replicas of the model. Flags of data,
checkpoints and logging are ignored. Runs on GPUs if there are enough, otherwise on the CPU.
"""

import argparse
import contextlib
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch
import torch.distributed as dist

from megatron.core.exceptions import UserError
from megatron.diagnosis.layout_check.differences import differences, report
from megatron.diagnosis.layout_check.layout_trace import FORWARD, LayoutTrace, record_layout_trace
from megatron.diagnosis.layout_check.shrink_run import flags_of_script, flags_that_matter, shrink_run
from megatron.facades.global_vars import published
from megatron.programs import entry_script
from megatron.training.arguments import configure
from megatron.training.config.command_line import ExtraArgsProvider, read_command_line
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.errors import exit_with_problems
from megatron.training.providers import Providers

PRETRAIN_GPT = entry_script("gpt")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--as-rank"]:
        return as_rank(Path(words[1]))
    own, flags = _split(words)
    options = _read(own)
    try:
        script = load_script(options.script)
        config = config_of(flags, script.add_flags)
        small = shrink_run(config, options.processes, options.steps)
        of_script = flags_of_script(flags)
        small.words += of_script
        small.plain_words += of_script
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for note in [*small.notes, *filter(None, (script.note,))]:
                print(note)
            print(f"{options.steps} steps in {small.sizes.ranks} processes ({small.sizes}), then in one", flush=True)
            ranks = run(options.script, small.words, small.sizes.ranks, options.steps, folder / "layout")
            (alone,) = run(options.script, small.plain_words, 1, options.steps, folder / "one")
    except UserError as error:
        exit_with_problems(error)
    found = differences(alone, ranks, options.tolerance)
    if not any(kind == FORWARD for kind, _ in alone.found):
        print("outputs of layers are not compared: the model is no GPTModel")
    launch_environment = LaunchEnvironment(small.sizes.ranks, False)
    axes = configure(small.words, script.add_flags, launch_environment=launch_environment).grid.dense
    coordinates = {rank: axes.coordinates(rank) for rank in range(small.sizes.ranks)}
    print(*report(found, coordinates, len(alone.found), options.tolerance), sep="\n", flush=True)
    return 1 if found else 0


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of this tool and those of the run, which follow `--`."""
    if "--" not in words:
        return list(words), []
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def _read(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="verify_layout.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--script", type=Path, default=PRETRAIN_GPT, metavar="FILE", help="the run's script (default: pretrain_gpt.py)"
    )
    parser.add_argument("--processes", type=int, default=8, help="largest number of processes to start (default: 8)")
    parser.add_argument("--steps", type=int, default=3, help="number of training steps (default: 3)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-9,
        help="largest accepted error, relative to the largest value (default: 1e-9)",
    )
    return parser.parse_args(words)


@dataclass(frozen=True)
class Script:
    """The parts of a training script that the check needs."""

    providers: Providers
    add_flags: ExtraArgsProvider | None
    """Adds the script's own flags to a parser; None if it has none."""
    defaults: dict[str, Any] | None = None
    """The script's defaults of flags (DEFAULTS), if it has any."""
    note: str | None = None
    """Line about functions that are not the script's own."""


def load_script(path: Path) -> Script:
    """Imports a training script, without running its `__main__` part. Raises UserError if it is not a Python file or
    lacks a provider."""
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--script {path}: no such Python file")
    sys.path.insert(0, str(path.resolve().parent))  # for its imports, as Python does for the script that it runs
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    names = ("build_model", "build_datasets", "build_forward_step")
    missing = [name for name in names if not callable(getattr(module, name, None))]
    others = [other for other in vars(module).values() if inspect.ismodule(other) and set(names) <= vars(other).keys()]
    if missing and len(others) != 1:
        raise UserError(
            f"--script {path}: the script has no {', '.join(missing)}; it must define or import the functions "
            f"{', '.join(names)}, as examples/custom_model/pretrain_custom.py does"
        )
    note = f"--script {path}: {', '.join(missing)} of {others[0].__name__}, which it imports" if missing else None
    functions = (getattr(others[0] if name in missing else module, name) for name in names)
    add_flags, defaults = getattr(module, "add_flags", None), getattr(module, "DEFAULTS", None)
    return Script(published(Providers(*functions)), add_flags, defaults, note)


def config_of(flags: Sequence[str], add_flags: ExtraArgsProvider | None = None) -> PretrainConfig:
    """Returns the config of the run. Raises ConfigurationError with all mistakes."""
    launch_environment, words = LaunchEnvironment.of_this_process(), flags_that_matter(flags)
    world_size = launch_environment.world_size
    if not launch_environment.world_size_is_given:
        values = read_command_line(words, add_flags).values
        sizes = (f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
        world_size = 2 * math.prod(max(1, int(values[name])) for name in sizes)
    return configure(words, add_flags, launch_environment=LaunchEnvironment(world_size, launch_environment.has_cuda))


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def run(
    script: Path, words: Sequence[str], world_size: int, steps: int, folder: Path, **options: Any
) -> list[LayoutTrace]:
    """Runs a script with these flags on `world_size` processes. Returns the trace of each rank. `options` are passed to
    `trace_of_rank` and `record_layout_trace`; they have JSON's types.

    Raises UserError with the last output of a rank that fails.
    """
    folder.mkdir()
    told = {"script": str(script.resolve()), "words": list(words), "steps": steps, "options": options}
    (folder / "run.json").write_text(json.dumps(told))
    # This process holds the rendezvous store, as torchrun does, so that its free port stays reserved.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment = {**os.environ, **rendezvous, "WORLD_SIZE": str(world_size)}
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


def as_rank(folder: Path) -> int:
    """Runs one of the processes: trains, and writes its trace into `folder`. Returns the exit code."""
    told = json.loads((folder / "run.json").read_text())
    rank = int(os.environ["RANK"])
    try:
        trace = trace_of_rank(Path(told["script"]), told["words"], told["steps"], **told["options"])
    except UserError as error:
        exit_with_problems(error)
    trace.save(folder / f"rank_{rank}.safetensors")
    return 0


def trace_of_rank(
    path: Path, words: Sequence[str], steps: int, defaults: dict[str, Any] | None = None, **options: Any
) -> LayoutTrace:
    """Trains this process's rank of a script's run and returns its trace. `defaults` are those of the script."""
    script = load_script(path)
    return record_layout_trace(configure(words, script.add_flags, defaults), script.providers, steps, **options)


if __name__ == "__main__":
    run_main(main)
