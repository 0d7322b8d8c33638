"""Judges a run before it costs much: its throughput, loss, resume or memory.

    python tools/validate.py throughput --target 9000 -- pretrain_gpt.py FLAGS    # runs a few steps of it
    python tools/validate.py loss --steps 300 -- pretrain_gpt.py FLAGS
    python tools/validate.py loss --run checkpoints --by-step 1000                # a run that exists
    python tools/validate.py resume --steps 10 --at 5 --layout "--tensor-model-parallel-size 2" -- my_script.py FLAGS
    python tools/validate.py memory --nproc-per-node 8 -- pretrain_gpt.py FLAGS

Prints one line: PASS, FAIL or UNSURE, the reason and the figures. Exit code 0: pass; 1: fail; 3: unsure; 2: bad input.

The words after -- are the command of the run, with its launcher or without. Without a launcher the gate starts as many
processes as --nproc-per-node says or the layout needs. The gate replaces the flags of checkpoints, logs and evaluation,
so the folders of the run stay as they are.
"""

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

from megatron.core.exceptions import UserError
from megatron.diagnosis.gates.finished_run import open_finished_run
from megatron.diagnosis.gates.loss import LossRequest, judge_loss_of, judge_loss_of_command, plot_verdict
from megatron.diagnosis.gates.memory import judge_memory, judge_memory_of
from megatron.diagnosis.gates.resume import ResumePlan, judge_resume
from megatron.diagnosis.gates.throughput import judge_throughput, speeds
from megatron.diagnosis.gates.user_run import UserRun, read_user_run, run_part
from megatron.diagnosis.gates.verdict import Verdict
from megatron.programs import entry_script
from megatron.training.config.tool_flags import ToolParser, number
from megatron.training.launch.errors import exit_with_problems

PRETRAIN_GPT = entry_script("gpt")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    try:
        options = _parser().parse_args(own)
        if options.run is not None and command:
            raise UserError("--run FOLDER and a command after -- exclude each other; give one")
        for flag in ("--steps", "--nproc-per-node", "--output", "--keep-routing"):
            if options.run is not None and any(word.partition("=")[0] == flag for word in own):
                raise UserError(f"{flag} is for a command after --, and has no effect with --run")
        with _folder(options.output) as folder:
            verdict = _GATES[options.gate](options, command, folder)
            if options.json is not None:
                verdict.write(options.json)
    except UserError as error:
        exit_with_problems(error)
    print(verdict.line, flush=True)
    return verdict.exit_code


@contextlib.contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    if output is None:
        with tempfile.TemporaryDirectory(prefix="validate-") as name:
            yield Path(name)
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output}: give a folder that is empty or does not exist")
    output.mkdir(parents=True, exist_ok=True)
    yield output


def _parser() -> ToolParser:
    parser = ToolParser(prog="validate.py", description=__doc__)
    gates = parser.add_subparsers(dest="gate", required=True, metavar="throughput|loss|resume|memory")

    def gate(name: str, help: str, *, finished: bool = True) -> ToolParser:
        one = gates.add_parser(name, help=help, description=help)
        one.set_defaults(run=None)
        if finished:
            one.add_argument("--run", type=Path, metavar="FOLDER", help="folder or metrics.jsonl of a run to judge")
        one.add_argument("--json", type=Path, metavar="FILE", help="also write the verdict as JSON")
        one.add_argument("--output", type=Path, metavar="FOLDER", help="keep what the gate's runs write (default: not)")
        one.add_argument("--nproc-per-node", type=_count, metavar="N", help="processes (default: the layout's)")
        return one

    one = gate("throughput", "Tokens per second and GPU after the warm-up, against a target.")
    one.add_argument("--target", type=_positive, required=True, metavar="TOKENS", help="tokens per second and GPU")
    one.add_argument("--warmup-steps", type=_count, default=5, metavar="N", help="steps left out (default: 5)")
    one.add_argument("--steps", type=_count, default=30, metavar="N", help="steps to run (default: 30)")
    one.add_argument("--gpus", type=_count, metavar="N", help="with --run: its GPUs (default: as its checkpoint says)")

    one = gate("loss", "Whether the loss falls as it should, and what is wrong if not.")
    one.add_argument("--steps", type=_count, default=300, metavar="N", help="steps to run (default: 300)")
    one.add_argument("--by-step", type=_count, metavar="N", help="judge up to this step (default: the last)")
    one.add_argument("--expected-loss", type=_positive, metavar="LOSS", help="largest loss to accept at --by-step")
    one.add_argument("--loss-name", default="lm loss", help="name in metrics.jsonl (default: %(default)s)")
    one.add_argument("--vocab-size", type=_count, metavar="N", help="tokens of the vocabulary (default: by the data)")
    one.add_argument("--unigram-entropy", type=_positive, metavar="NATS", help="of the data (default: counted)")
    one.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss with the verdict as PNG")

    one = gate("resume", "Whether N steps equal K steps, a checkpoint and N - K more.", finished=False)
    one.add_argument("--steps", type=_count, default=10, metavar="N", help="steps in all (default: 10)")
    one.add_argument("--at", type=_count, default=5, metavar="K", help="step of the checkpoint (default: 5)")
    one.add_argument(
        "--layout", action="append", default=[], metavar="FLAGS", help="resume in this layout too; may be repeated"
    )
    one.add_argument("--tolerance", type=_positive, help="relative, of other layouts (default: 1e-4; bf16, fp8: 2e-2)")

    one = gate("memory", "Peak memory with the longest rows and the most uneven routing.")
    one.add_argument(
        "--max-utilization", type=number(1, 100, "85"), default=85.0, metavar="PERCENT", help="default: 85"
    )
    one.add_argument("--steps", type=_count, default=3, metavar="N", help="steps to run (default: 3)")
    one.add_argument("--memory-gib", type=_positive, metavar="GIB", help="memory to compare with (default: the GPU's)")
    one.add_argument("--keep-routing", action="store_true", help="let routers choose experts as the model does")
    return parser


def _count(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r}: give a whole number, 1 or more")
    return int(word)


def _positive(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r}: give a number above 0")
    return value


def _run_of(options: argparse.Namespace, command: Sequence[str]) -> UserRun:
    return read_user_run(command, PRETRAIN_GPT, options.nproc_per_node)


def _throughput(options: argparse.Namespace, command: Sequence[str], folder: Path) -> Verdict:
    if options.run is not None:
        finished = open_finished_run(options.run)
        gpus = options.gpus or finished.ranks
        if gpus is None:
            raise UserError(f"--run {options.run}: no checkpoint tells the number of GPUs; give --gpus")
        return judge_throughput(speeds(finished.metrics, gpus, options.warmup_steps), options.target)
    run = _run_of(options, command)
    # The run waits for the GPU at each log line, so intervals have several steps.
    part = run_part(run, folder, options.steps, log_interval=5)
    if part.exit_code:
        raise UserError(f"the run failed (exit code {part.exit_code}): {part.failure}")
    return judge_throughput(speeds(part.metrics(), run.processes, options.warmup_steps), options.target)


def _loss(options: argparse.Namespace, command: Sequence[str], folder: Path) -> Verdict:
    request = LossRequest(
        options.loss_name, options.by_step, options.expected_loss, options.vocab_size, options.unigram_entropy
    )
    if options.run is not None:
        judged = judge_loss_of(open_finished_run(options.run), request)
    else:
        judged = judge_loss_of_command(_run_of(options, command), request, options.by_step or options.steps, folder)
    if options.plot is not None:
        plot_verdict(judged, options.plot, options.loss_name)
    return judged.verdict


def _resume(options: argparse.Namespace, command: Sequence[str], folder: Path) -> Verdict:
    layouts = tuple(tuple(shlex.split(layout)) for layout in options.layout)
    plan = ResumePlan(options.steps, options.at, layouts, options.tolerance)
    return judge_resume(_run_of(options, command), plan, folder)


def _memory(options: argparse.Namespace, command: Sequence[str], folder: Path) -> Verdict:
    if options.run is not None:
        return judge_memory_of(open_finished_run(options.run), options.max_utilization, options.memory_gib)
    return judge_memory(
        _run_of(options, command),
        folder,
        steps=options.steps,
        max_utilization=options.max_utilization,
        limit=options.memory_gib,
        uneven=not options.keep_routing,
    )


_GATES: dict[str, Callable[[argparse.Namespace, Sequence[str], Path], Verdict]] = {
    "throughput": _throughput,
    "loss": _loss,
    "resume": _resume,
    "memory": _memory,
}


if __name__ == "__main__":
    run_main(main)
