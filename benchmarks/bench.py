"""Measures how fast training is: python benchmarks/bench.py LLAMA1B

Trains a model of the speed table (bench_cells.py), or a model described by flags of pretrain_gpt.py, on random
tokens, or on those of `--data-path`: a few steps to warm up, then 20 timed steps, with optimizer, clipping and logging.
Prints the median time of a step, model FLOPs and tokens per second, memory, the GPU's clock and the last loss. Flags
after the name of a model override the model's flags. `--kernels` traces one more step on every rank and prints its time
by kind of kernel, and the exposed part of its communication. `--floor` measures afterwards, on all ranks, how fast the
step could be (bench_floor.py). On several GPUs:

    torchrun --nproc_per_node 2 benchmarks/bench.py LLAMA1B --context-parallel-size 2
"""

import contextlib
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import numpy as np
import torch

import pretrain_gpt
from benchmarks.bench_cells import CELLS, COMMON
from benchmarks.bench_floor import (
    SHARED_BATCHES_ARE_REFUSED,
    STAGES_ARE_REFUSED,
    FloorMeasure,
    step_flops,
    step_microbatches,
)
from benchmarks.bench_trace import StepTrace, gather_timeline, timeline_lines
from benchmarks.measuring import parser_of
from benchmarks.recorder import Recorder
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.exceptions import UserError
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.gpt_dataset import MockGPTDataset, MockGPTLowLevelDataset
from megatron.facades.pretrain import pretrain_config
from megatron.training.arguments import configure
from megatron.training.config.resolution import ConfigurationError
from megatron.training.data.sources import gpt_dataset_config
from megatron.training.hooks.hook import Hook
from megatron.training.launch.errors import exit_with_problems
from megatron.training.log.memory import memory_report
from megatron.training.log.throughput import peak_tflops
from megatron.training.log.timeline import StepTimes
from megatron.training.providers import Context, ForwardStep, Providers, SampleCounts


@dataclass(frozen=True)
class Options:
    """Options of the measurement, in addition to the flags of the run."""

    cell: str | None
    warmup: int
    steps: int
    zipf: float | None
    """Exponent of the frequencies of random tokens; None: the tokens are those of files."""
    documents: float | None
    kernels: bool
    floor: float | None
    """Seconds for which each operation of the floor is timed; None: no floor."""
    json: Path | None

    @property
    def iterations(self) -> int:
        """Steps of the whole run: warm-up, timed steps, and one with a profiler if kernels are timed."""
        return self.warmup + self.steps + self.kernels

    @property
    def recorded_step(self) -> int:
        """Iterations before the step whose communication counts for the floor: the last one of the warm-up, so that no
        timed step is disturbed. The first step differs from others: its weights are whole already."""
        return min(max(1, self.warmup - 1), self.iterations - 1)


DATA_FLAGS = ("--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path", "--data-stages")
"""Flags that name token files, whose tokens take the place of random ones."""


class RandomDocuments(MockGPTLowLevelDataset):
    """Documents of random tokens; token i is as frequent as (i + 1)^-`exponent`."""

    exponent = 1.0
    mean_length: float | None = None
    """Mean of log-normal lengths (sigma 1); None: uniform lengths up to 4096."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        if self.mean_length is not None:
            random = np.random.default_rng(self.seed)
            lengths = random.lognormal(math.log(self.mean_length) - 0.5, 1.0, self.num_documents)
            self.sequence_lengths = np.maximum(lengths, 2).astype(np.int32)

    def __getitem__(self, idx: int) -> np.ndarray:
        random, vocabulary = np.random.default_rng((self.seed, idx)), self.tokenizer.vocab_size
        share = random.random(int(self.sequence_lengths[idx]) - 1)
        # The inverse of the continuous distribution: density x^-exponent from 1 to vocabulary + 1.
        if self.exponent == 1.0:
            place = (vocabulary + 1.0) ** share
        else:
            power = 1.0 - self.exponent
            place = (1.0 + share * ((vocabulary + 1.0) ** power - 1.0)) ** (1.0 / power)
        return np.append(np.minimum(place.astype(np.int64) - 1, vocabulary - 1), self.tokenizer.eod)


class RandomDataset(MockGPTDataset):
    """Samples of `RandomDocuments`."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> RandomDocuments:
        """Returns the documents."""
        return RandomDocuments(config.tokenizer)


def build_datasets(context: Context, counts: SampleCounts) -> Sequence[Any]:
    """Returns datasets of random tokens for every split."""
    config = gpt_dataset_config(context.config, context.tokenizer)
    sizes = [counts.train, counts.valid, counts.test]
    return BlendedMegatronDatasetBuilder(RandomDataset, sizes, lambda: True, config).build()


class Stopwatch(Hook):
    """Records when each timed step ended on the device, traces one more step, and asks all ranks for their memory."""

    def __init__(self, context: Context, options: Options) -> None:
        self.context, self.options = context, options
        self.on_gpu = context.environment.device.type == "cuda"
        self.marks: list[Any] = []
        self.clock: int | None = None
        self.trace: StepTrace | None = None
        self.timeline: dict[str, Any] | None = None
        """Times of the traced step on all ranks."""
        self.peak_memory: int | None = None
        """Bytes of the rank that held most; None on CPUs."""
        self.finished = False

    def before_step(self, iteration: int) -> None:
        """Starts the trace before the last step, if kernels are timed."""
        if self.options.kernels and iteration == self.options.warmup + self.options.steps:
            if self.on_gpu:
                torch.cuda.synchronize()
            self.trace = StepTrace(self.on_gpu)
            if self.on_gpu:  # else the first communication of the step contains the wait for the slowest profiler
                RankCoordinator().gather(None)

    def after_step(self, iteration: int) -> None:
        """Marks the time of a timed step, or ends the trace; after the last step gathers memory and times of ranks."""
        times: StepTimes | None = None
        if self.trace is not None:
            if self.on_gpu:
                torch.cuda.synchronize()
            times = self.trace.stop()
        elif iteration >= self.options.warmup:
            mark: Any = torch.cuda.Event(enable_timing=True) if self.on_gpu else time.perf_counter()
            if self.on_gpu:
                mark.record()
            self.marks.append(mark)
        if self.on_gpu and iteration == self.options.warmup + self.options.steps // 2:
            self.clock = _clock_rate()
        if iteration == self.options.iterations:
            peaks = RankCoordinator().gather(
                memory_report(self.context.environment.device).peak if self.on_gpu else None
            )
            self.peak_memory = max(peaks) if self.on_gpu else None
            if times is not None:
                self.timeline = gather_timeline(times, self.context.environment.rank)

    def on_exit(self, iteration: int) -> None:
        """Notes whether all steps were run."""
        self.finished = iteration == self.options.iterations

    def milliseconds(self) -> list[float]:
        """Milliseconds of each timed step."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.on_gpu:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in pairs]
        return [(end - begin) * 1000 for begin, end in pairs]


def _clock_rate() -> int | None:
    try:
        return torch.cuda.clock_rate()
    except (ImportError, RuntimeError):  # needs pynvml
        return None


def read_options(words: Sequence[str]) -> tuple[Options, list[str]]:
    """Returns the options of the measurement and the flags of the run."""
    parser = parser_of(__doc__)
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps")
    parser.add_argument(
        "--zipf", type=float, metavar="S", help="token i is as frequent as i^-S (default 1); 0: all alike"
    )
    parser.add_argument(
        "--documents", type=float, metavar="N", help="pack documents of log-normal lengths, of N tokens on average"
    )
    parser.add_argument("--kernels", action="store_true", help="print where the time of one more step goes")
    parser.add_argument(
        "--floor",
        type=float,
        nargs="?",
        const=0.3,
        metavar="SECONDS",
        help="time the step's products and attention alone, each for SECONDS (0.3), and print the floor of a step",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--flags", action="store_true", help="print the flags of the cell and stop")
    parser.usage = f"%(prog)s [{' | '.join(CELLS)}] [options] [flags of pretrain_gpt.py]"
    cell = words[0] if words and not words[0].startswith("-") else None
    if cell is not None and cell not in CELLS:
        parser.error(f"{cell} is no cell: {', '.join(CELLS)}")
    args, flags = parser.parse_known_args(words[cell is not None :])
    model = [*CELLS[cell].split(), "--bf16"] if cell is not None else []
    if args.flags:
        print(*model, *flags)
        raise SystemExit(0)
    named = [flag for flag in flags if flag.split("=")[0] in DATA_FLAGS]
    if named and (args.zipf, args.documents) != (None, None):
        parser.error(f"--zipf and --documents describe random tokens, and {named[0]} names real ones: give one of them")
    zipf = None if named else 1.0 if args.zipf is None else args.zipf
    common = [word for word in COMMON.split() if not (named and word == "--mock-data")]
    if args.documents is not None:
        flags += ["--reset-position-ids", "--reset-attention-mask"]
    if "--vocab-size" in model:  # NullTokenizer adds an id to these; the anchor's does not
        size = model.index("--vocab-size") + 1
        model[size] = str(int(model[size]) - 1)
    options = Options(cell, args.warmup, args.steps, zipf, args.documents, args.kernels, args.floor, args.json)
    return options, [*common, *model, *flags, "--train-iters", str(options.iterations)]


def measure(options: Options, flags: list[str]) -> tuple[dict[str, Any], Stopwatch] | None:
    """Trains the model. Returns the results on the rank that logs, None elsewhere."""
    watches: list[Stopwatch] = []
    floors: list[FloorMeasure] = []
    recorder = Recorder()
    data = pretrain_gpt.build_datasets
    if options.zipf is not None:
        data = build_datasets
        RandomDocuments.exponent, RandomDocuments.mean_length = options.zipf, options.documents

    def build_hooks(context: Context) -> list[Hook]:
        watches.append(Stopwatch(context, options))
        if options.floor is not None:
            steps = options.recorded_step, options.iterations
            floors.append(FloorMeasure(context, providers, recorder, options.floor, *steps))
        return [*watches, *floors]

    def build_forward_step(context: Context) -> ForwardStep:
        return recorder.around(pretrain_gpt.build_forward_step(context))

    forward_step = pretrain_gpt.build_forward_step if options.floor is None else build_forward_step
    providers = Providers(
        pretrain_gpt.build_model, data, forward_step, build_hooks=build_hooks, cuts_shared_batches=True
    )
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        try:
            config = configure([*flags, "--metrics-path", str(metrics)])
        except ConfigurationError as error:
            exit_with_problems(error)
        if options.floor is not None and config.transformer.pipeline_model_parallel_size > 1:
            exit_with_problems(UserError(STAGES_ARE_REFUSED))
        if options.floor is not None and config.transformer.hybrid_context_parallel:
            exit_with_problems(UserError(SHARED_BATCHES_ARE_REFUSED))
        if options.documents is not None:
            recorder.attention_microbatches = step_microbatches(config)
        with contextlib.nullcontext() if options.floor is None else recorder.installed():
            pretrain_config(config, providers, time.monotonic())
        watch = watches[0]
        if not watch.finished:
            raise SystemExit("the run ended early: nothing was measured")
        if not watch.context.environment.logs:
            return None
        losses = [json.loads(line).get("lm loss") for line in metrics.read_text().splitlines()]
    row = results(options, flags, watch, [loss for loss in losses if loss is not None][-1])
    for measured in floors:
        assert measured.floor is not None
        print(*measured.floor.lines(row["milliseconds"]), sep="\n")
        row |= measured.floor.entries()
    return row, watch


def results(options: Options, flags: list[str], watch: Stopwatch, loss: float) -> dict[str, Any]:
    """Returns the row of a run."""
    config, device = watch.context.config, watch.context.environment.device
    world = watch.context.environment.world_size
    times = watch.milliseconds()
    seconds, length = statistics.median(times) / 1000, config.data.seq_length
    batch = config.training.global_batch_size
    assert length is not None and batch is not None
    tflops, peak = (
        step_flops(watch.context) / seconds / world / 1e12,
        peak_tflops(device, config.transformer.params_dtype, fp8=config.transformer.fp8 is not None),
    )
    return {
        "cell": options.cell,
        "gpus": world,
        "device": torch.cuda.get_device_name(device) if watch.on_gpu else "CPU",
        "milliseconds": round(seconds * 1000, 2),
        "fastest": round(min(times), 2),
        "slowest": round(max(times), 2),
        "steps": len(times),
        "tokens_per_second": round(batch * length / seconds, 1),
        "tflops": round(tflops, 2),
        "mfu": None if peak is None else round(tflops / peak, 4),
        "peak_memory_gb": None if watch.peak_memory is None else round(watch.peak_memory / 1e9, 2),
        "sm_clock_mhz": watch.clock,
        "loss": loss,
        "timeline": watch.timeline,
        "zipf": options.zipf,
        "documents": options.documents,
        "flags": " ".join(flags),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
    }


def commit() -> str | None:
    """Returns the checkout's commit. If the code was copied without its history, $COMMIT must name it. None if
    unknown."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def main(words: Sequence[str] | None = None) -> None:
    """Runs the measurement that the command line describes, and prints its row."""
    options, flags = read_options(sys.argv[1:] if words is None else words)
    measured = measure(options, flags)
    if measured is None:
        return
    row, watch = measured
    mfu, memory, clock = (
        row[name] if row[name] is not None else "?" for name in ("mfu", "peak_memory_gb", "sm_clock_mhz")
    )
    print(
        f"{row['cell'] or 'model'}: {row['milliseconds']} ms a step ({row['fastest']} to {row['slowest']}, "
        f"{row['steps']} steps), {row['tflops']} TFLOP/s, MFU {mfu}, {row['tokens_per_second']:.0f} tokens/s, "
        f"{memory} GB, {clock} MHz, loss {row['loss']:.4f}"
    )
    if watch.trace is not None and watch.timeline is not None:
        print(*watch.trace.kernel_lines(), *timeline_lines(watch.timeline), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    run_main(main)
