"""Measures the time and memory to build and read datasets. Prints rows of a table for docs/benchmarks.md.

python benchmarks/bench_datasets.py
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import numpy as np

from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.index_building import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_samples,
)
from megatron.data.datasets.masking import MaskingRule, draw_spans, words_of
from megatron.data.datasets.sample_map import SampleMap, SampleMapPlan, build_sample_map, find_usable_documents
from megatron.data.datasets.special_tokens import cumulative_lengths, document_mask
from megatron.data.datasets.utils import Split

_BLEND_IN_A_PROCESS = "--blend-in-this-process"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--documents", type=int, default=30_000_000, help="documents to index (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=4096, help="tokens of a sample (default: %(default)s)")
    parser.add_argument("--sentences", type=int, default=10_000_000, help="sentences of BERT (default: %(default)s)")
    parser.add_argument("--datasets", type=int, default=64, help="datasets of the blend (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=100_000_000, help="samples of the blend (default: %(default)s)")
    parser.add_argument(_BLEND_IN_A_PROCESS, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.blend_in_this_process:
        measure_blend(args.datasets, args.samples)
        return 0
    print("| what | measured |\n|---|---|")
    measure_indices(args.documents, args.sequence_length)
    measure_sample_map(args.sentences)
    measure_masking()
    # In a separate process, so that its memory is only that of the blend.
    command = [sys.executable, __file__, _BLEND_IN_A_PROCESS, "--datasets", str(args.datasets)]
    subprocess.run([*command, "--samples", str(args.samples)], check=True)
    measure_boundaries(2 * args.sequence_length)
    return 0


def measure_indices(num_documents: int, sequence_length: int) -> None:
    """Times the three indices of a dataset whose documents have a thousand tokens on average."""
    lengths = np.random.default_rng(0).integers(1, 2000, num_documents).astype(np.int32)
    plan = plan_samples(int(lengths.sum(dtype=np.int64)), None, sequence_length, 1)
    build_sample_index(lengths[:100], np.arange(100, dtype=np.int32), plan_samples(10_000, None, 10, 1))  # compile
    random = np.random.RandomState(1)
    documents, shuffling = _timed(lambda: build_document_index(range(num_documents), plan, random))
    cutting = _fastest(lambda: build_sample_index(lengths, documents, plan), 3)
    _, shuffling_samples = _timed(lambda: build_shuffle_index(plan, random))
    size = f"{num_documents:.0e} documents, {plan.num_samples} samples of {sequence_length} tokens"
    _row(f"sample index of {size}", f"{cutting:.2f} s")
    _row("shuffle of these documents", f"{shuffling:.2f} s")
    _row("shuffle of these samples", f"{shuffling_samples:.2f} s")


def measure_sample_map(num_sentences: int) -> None:
    """Times the sample map of BERT for documents of 20 sentences, with 512 tokens in a sample."""
    lengths = np.random.default_rng(0).integers(5, 60, num_sentences).astype(np.int32)
    boundaries = np.append(np.arange(0, num_sentences, 20), num_sentences)
    plan = SampleMapPlan(None, 509, 2, 0.1, 1)

    def build(boundaries: np.ndarray) -> SampleMap:
        usable = find_usable_documents(boundaries, lengths, plan.min_sentences).usable
        return build_sample_map(boundaries, lengths, usable, plan)

    build(boundaries[:3])  # compile
    built, _ = _timed(lambda: build(boundaries))
    seconds = _fastest(lambda: build(boundaries), 3)
    _row(f"sample map of BERT, {num_sentences:.0e} sentences in {len(built.rows)} samples", f"{seconds:.2f} s")


def measure_masking() -> None:
    """Times how the masked spans of a sample of 512 tokens are drawn, for BERT and for T5."""
    random = np.random.RandomState(1)
    words = words_of(random.random_sample(512) < 0.25, np.zeros(512, np.bool_))
    for name, rule in (("BERT", MaskingRule(0.15, 3, geometric=False)), ("T5", MaskingRule(0.15, 10, geometric=True))):
        most = rule.count(512, 509)
        seconds = _fastest(lambda rule=rule, most=most: list(draw_spans(words, most, rule, random)), 100)  # type: ignore[misc]
        _row(f"masked spans of a sample of 512 tokens, {name}", f"{seconds * 1e3:.2f} ms")


def measure_blend(num_datasets: int, size: int) -> None:
    """Measures a blend: memory, first sample, and a late sample with and without the counts of an earlier run."""
    weights = np.random.default_rng(0).random(num_datasets)
    parts: list[Any] = [_OfLength(int(size * 2 * weight / weights.sum()) + 2) for weight in weights]
    far = size // 10 * 9
    blended(parts, weights, 1000, None)[0]  # compile
    before = _memory()
    blend, building = _timed(lambda: blended(parts, weights, size, None))
    _, first = _timed(lambda: blend[0])
    _, reaching = _timed(lambda: blend[far])
    memory = _memory() - before
    what = f"blend of {num_datasets} datasets, {size:.0e} samples"
    _row(f"{what}: built, first sample read", f"{(building + first) * 1e3:.1f} ms")
    _row(f"{what}: memory, read up to 90%", f"{memory / 2**20:.1f} MiB")
    _row(f"{what}: first sample at 90%, nothing kept", f"{reaching:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        blended(parts, weights, size, folder)[far]
        resumed, building = _timed(lambda: blended(parts, weights, size, folder))
        _, reaching = _timed(lambda: resumed[far])
    _row(f"{what}: first sample at 90%, counts kept by an earlier run", f"{building + reaching:.2f} s")


def measure_boundaries(sequence_length: int) -> None:
    """Times document boundaries of a sample, as lengths and as a mask."""
    random = np.random.default_rng(0)
    tokens = np.where(random.random(sequence_length) < 1 / 500, 0, random.integers(1, 50_000, sequence_length))
    boundaries = cumulative_lengths(tokens, 0)
    as_boundaries = _fastest(lambda: cumulative_lengths(tokens, 0), 1000)
    as_mask = _fastest(lambda: document_mask(boundaries), 3)
    what = f"documents of a sample of {sequence_length} tokens"
    _row(f"{what} as cumulative lengths", f"{as_boundaries * 1e6:.0f} us, {boundaries.nbytes} bytes")
    _row(f"{what} as an s x s mask", f"{as_mask * 1e6:.0f} us, {sequence_length**2} bytes")


class _OfLength:
    """A dataset that has a length, but no data."""

    index_split = Split.train
    dataset_path = None

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return {}


def blended(parts: list[Any], weights: np.ndarray, size: int, folder: str | None) -> BlendedDataset:
    """Returns the blend of these parts, which keeps its counts in `folder`."""
    config: Any = SimpleNamespace(path_to_cache=folder)
    return BlendedDataset(parts, weights.tolist(), size, config)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def _fastest(work: Callable[[], Any], times: int) -> float:
    return min(_timed(work)[1] for _ in range(times))


def _memory() -> int:
    """Returns the resident memory of this process in bytes."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def _row(what: str, measured: str) -> None:
    print(f"| {what} | {measured} |", flush=True)


if __name__ == "__main__":
    run_main(main)
