"""The floor of a run of bench.py: what every rank computes and sends in a step, and how long this takes at least.

Each rank records its own micro-batch (recorder.py) and times its own operations (floor.py), all ranks at
the same time. The floor of a step is the mean over the ranks, as if each rank had equally much to compute.
Communication can hide behind computation, so it is no part of this sum. Its time is the bytes that a rank sends in a
step, divided by the rate of a large transfer between the ranks.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.floor import Clock, Timed, link_rates, measure_floor, summary
from benchmarks.measure_layout import rows_of
from benchmarks.recorder import Recorder
from megatron.core.communication.traffic import Traffic, recorded
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.distributed.sharding_strategy import ShardingStrategy
from megatron.data.tokenizer.build import padded_vocab_size
from megatron.diagnosis.memory.rank_memory import build_shard, memory_of_shard
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.hooks.hook import Hook
from megatron.training.log.throughput import flops_of_samples
from megatron.training.providers import Context, Providers

STAGES_ARE_REFUSED = (
    "--floor does not count pipeline stages: they wait for each other, and the recorder cannot tell the chunks of a "
    "rank apart; use --pipeline-model-parallel-size 1"
)
"""Why a run with pipeline parallelism has no floor."""

SHARED_BATCHES_ARE_REFUSED = (
    "--floor takes one micro-batch as all of a step, and with --hybrid-context-parallel each has its own documents; "
    "leave --floor out"
)
"""Why a run with dynamic context parallelism has no floor."""


def padded_vocabulary(context: Context) -> int:
    """Returns the number of rows of the embedding."""
    config = context.config
    return padded_vocab_size(
        context.vocab_size,
        config.model.make_vocab_size_divisible_by,
        config.transformer.tensor_model_parallel_size,
    )


def step_flops(context: Context) -> float:
    """Returns the model FLOPs of a step of all ranks."""
    batch = context.config.training.global_batch_size
    assert batch is not None
    return flops_of_samples(context.config, padded_vocabulary(context), batch)


def step_microbatches(config: PretrainConfig) -> int:
    """Returns the number of micro-batches that a rank computes in a step."""
    batch = config.training.global_batch_size
    assert batch is not None
    return batch // (config.training.micro_batch_size * config.grid.data)


@dataclass(frozen=True)
class StepFloor:
    """The floor of a step, as every rank knows it."""

    found: Sequence[Timed]
    """The operations of this rank."""
    ranks: Sequence[Mapping[str, Any]]
    """For each rank: milliseconds by part (`parts`), FLOPs of a step (`flops`), bytes per millisecond (`rates`), and by
    kind of communication [calls, bytes sent, milliseconds] (`communication`)."""
    rank: int
    model_flops: float

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds of each part: the mean over the ranks."""
        return {part: round(ms, 2) for part, ms in self._means([rank["parts"] for rank in self.ranks]).items()}

    @property
    def milliseconds(self) -> float:
        """The floor without communication."""
        return sum(self.parts.values())

    def entries(self) -> dict[str, Any]:
        """Returns the entries of the row."""
        found: dict[str, Any] = {"floor_milliseconds": round(self.milliseconds, 2), "floor_parts": self.parts}
        if len(self.ranks) > 1:
            found["floor_communication"] = {kind: round(ms, 2) for kind, ms in self._communication(2).items()}
        return found

    def lines(self, step: float) -> Iterator[str]:
        """Yields the floor for the terminal, beside a step of so many milliseconds."""
        several, floor = len(self.ranks) > 1, self.milliseconds
        share = sum(rank["flops"] for rank in self.ranks) / self.model_flops
        without = " without communication" if several else ""
        yield f"floor: {floor:.1f} ms{without}, {floor / step:.1%} of the step; it has {share:.1%} of the model FLOPs"
        if several:
            own = [sum(rank["parts"].values()) for rank in self.ranks]
            least, most = min(own), max(own)
            yield f"mean of {len(own)} ranks ({least:.1f} to {most:.1f} ms); operations are those of rank {self.rank}"
        for part, total in self.parts.items():
            yield f"{total:10.2f} ms  {part}"
            yield from ("    " + each.describe() for each in self.found if each.part == part)
        if several:
            yield from self._communication_lines(step)

    def _communication_lines(self, step: float) -> Iterator[str]:
        rates = self._means([rank["rates"] for rank in self.ranks])
        listed = ", ".join(f"{name} {rate / 1e6:.1f} GB/s" for name, rate in rates.items())
        yield f"communication of a rank in a step, which can hide behind computation, at the faster rate of: {listed}"
        calls, sent, times = (self._communication(place) for place in range(3))
        for kind, ms in times.items():
            yield f"{ms:10.2f} ms  {kind}: {calls[kind]:.0f} calls, {sent[kind] / 1e6:.2f} MB sent"
        total = self.milliseconds + sum(times.values())
        yield f"floor with communication: {total:.1f} ms, {total / step:.1%} of the step"

    def _communication(self, place: int) -> dict[str, float]:
        """Returns one of the three numbers by kind of communication: the mean over the ranks."""
        own = [{kind: entry[place] for kind, entry in rank["communication"].items()} for rank in self.ranks]
        return self._means(own)

    def _means(self, own: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for entry in own for name in entry)
        return {name: sum(entry.get(name, 0.0) for entry in own) / len(own) for name in names}


class FloorMeasure(Hook):
    """Records the communication of one step of this rank, and measures the floor when the run has ended. `recorder`
    records the first micro-batch."""

    def __init__(
        self, context: Context, providers: Providers, recorder: Recorder, seconds: float, step: int, last: int
    ) -> None:
        """Each operation is timed for `seconds`. The communication is that of the step after `step` iterations; `last`
        is the number of iterations of a complete run."""
        self.context, self.providers, self.recorder, self.seconds = context, providers, recorder, seconds
        self.step, self.last = step, last
        self.floor: StepFloor | None = None
        """None until the run has ended."""
        self._recording = contextlib.ExitStack()
        self._traffic: Sequence[Traffic] = []

    def before_step(self, iteration: int) -> None:
        """Starts to record the communication of the chosen step."""
        if iteration == self.step:
            self._traffic = self._recording.enter_context(recorded())

    def after_step(self, iteration: int) -> None:
        """Ends the record."""
        self._recording.close()

    def on_exit(self, iteration: int) -> None:
        """Measures the floor if all steps were run."""
        self._recording.close()
        if iteration == self.last:
            self.floor = self._measure()

    def _measure(self) -> StepFloor:
        ranks, environment, config = RankCoordinator(), self.context.environment, self.context.config
        gc.collect()
        if environment.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        clock, microbatches = Clock(environment.device, self.seconds), step_microbatches(config)
        update = update_bytes(self.context, self.providers)

        def largest(number: int) -> int:
            return max(ranks.gather(number))

        rates = {} if ranks.group is None or ranks.size == 1 else link_rates(ranks.group, largest, clock)
        largest(0)  # ranks begin together; from here to the end they do not wait for each other
        found = measure_floor(self.recorder, config.transformer, microbatches, update, clock)
        own = {
            "parts": summary(found),
            "flops": self.recorder.flops() * microbatches,
            "rates": rates,
            "communication": self._communication(max(rates.values(), default=0.0)),
        }
        return StepFloor(found, ranks.gather(own), environment.rank, step_flops(self.context))

    def _communication(self, rate: float) -> dict[str, tuple[int, int, float]]:
        """Returns calls, bytes sent and milliseconds by kind of communication."""
        rows = rows_of(self._traffic, self.context.environment.groups)
        return {
            f"{operation} of {dtype} over {group}": (calls, sent, sent / rate)
            for group, operation, dtype, calls, _, sent in rows
            if sent
        }


def update_bytes(context: Context, providers: Providers) -> int:
    """Returns the bytes that the norm of the gradient and the update of this rank's part of the weights move: both read
    the gradients, and the update reads and writes its state and writes the weights."""
    config, rank = context.config, context.environment.rank
    shard = build_shard(config, providers, context.tokenizer, padded_vocabulary(context), rank)
    # The part is the same under every strategy that shards the state; this one keeps nothing else.
    owned = {
        grid: dataclasses.replace(sharding, strategy=ShardingStrategy.PARAMETERS)
        for grid, sharding in shard.shardings.items()
    }
    memory = memory_of_shard(dataclasses.replace(shard, shardings=owned), config)
    return 2 * memory.gradients + 2 * memory.optimizer + memory.weights
