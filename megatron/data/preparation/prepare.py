"""Prepares data sets: plans the blocks, starts workers, merges their shards, and publishes the files."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from megatron.core.exceptions import UserError
from megatron.core.utils.files import sha256_of_file, sync_directory
from megatron.data.datasets.index_format import DType, get_bin_path, get_idx_path
from megatron.data.preparation.blocks import plan_blocks
from megatron.data.preparation.config import PreparationConfig
from megatron.data.preparation.inputs import find_inputs
from megatron.data.preparation.manifest import DataManifest, FileRecord, TokenizerRecord, cleaning_of, get_manifest_path
from megatron.data.preparation.merging import ShardMerger
from megatron.data.preparation.messages import BlockReport, Failure, FileEnd, Job, Message, Shared, block_number
from megatron.data.preparation.progress import Counts, ProgressDisplay
from megatron.data.preparation.readers import resolve_keys
from megatron.data.preparation.resuming import Journal, Unfinished, identity_of, working_folder
from megatron.data.preparation.sentences import build_splitter
from megatron.data.preparation.worker import ENDING_SIGNALS, run_worker
from megatron.data.tokenizer.base import Tokenizer

_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class PreparedData:
    """The prepared data sets: prefixes, manifests, examples of dropped lines, and the time in seconds."""

    prefixes: tuple[str, ...]
    manifests: tuple[DataManifest, ...]
    dropped_examples: tuple[str, ...]
    seconds: float


def prepare(
    config: PreparationConfig, tokenizer: Tokenizer, console: Console, warn: Callable[[str], None]
) -> PreparedData:
    """Prepares the data set of each key. Files get their final names once all of them are complete.

    Raises UserError with file:line for a bad line (unless bad lines are skipped), and for files that cannot be read or
    written.
    """
    began = time.monotonic()
    assert config.input
    files = find_inputs(config.input, warn)
    config = dataclasses.replace(config, json_keys=resolve_keys(config.json_keys, files, warn))
    assert config.input and config.output_prefix
    splitter = build_splitter(config.lang, config.keep_newlines, warn) if config.split_sentences else None
    prefixes = tuple(f"{config.output_prefix}_{key}_{config.level}" for key in config.json_keys)
    for path in map(get_bin_path, prefixes):
        if os.path.exists(path):
            warn(f"{path}: exists and will be replaced")
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    identity = identity_of(files, _settings(config, tokenizer, None if splitter is None else splitter.name))
    with (
        working_folder(config.output_prefix, "--output-prefix", f"preparing.{identity}", warn) as working,
        Journal(working.path, dtype) as journal,
    ):
        folder, working.holds_work = working.path, lambda: journal.recorded
        plan = plan_blocks(files, config.workers, journal.block_bytes)
        journal.begin(plan.block_bytes)
        done = [message for message in journal.messages if isinstance(message, BlockReport)]
        if done:
            warn(f"{folder}: continues an earlier run, which has finished {len(done)} blocks of the input")
        job = Job(
            tokenizer=tokenizer,
            keys=tuple(config.json_keys),
            partitions=1 if config.keep_sequential_samples else config.partitions,
            eod=tokenizer.eod if config.append_eod else None,
            on_error=config.on_error,
            longest_line=config.max_line_bytes,
            dtype=dtype,
            folder=folder,
            plan=plan,
            splitter=splitter,
            separator=config.document_separator,
            first_worker=journal.first_worker,
            done=frozenset((report.file, report.block) for report in done),
            ends={message.file: message.blocks for message in journal.messages if isinstance(message, FileEnd)},
        )
        tokenizer.encode_texts([""])  # the first use compiles and loads code: once, before workers are forked
        merger = ShardMerger(job)
        for message in journal.messages:
            merger.take(message)
        if not merger.done:
            workers = max(1, min(config.workers, len(plan.work_items)))
            journal.start_workers(workers)
            _run(job, workers, merger, journal, config.log_interval, console)
        if merger.fault is not None:
            raise UserError(f"{merger.fault} (--on-error skip leaves such lines out and counts them)")
        merger.finish()
        if merger.output(0).counts.documents == 0:
            raise UserError(f"--input {' '.join(config.input)}: contains no documents")
        manifests = tuple(_manifest(job, merger, key, config.deduplication) for key in range(len(job.keys)))
        for key, (final, manifest) in enumerate(zip(prefixes, manifests, strict=True)):
            output = merger.output(key)
            _publish(output.bin_path, output.idx_path, manifest, final)
    return PreparedData(prefixes, manifests, tuple(merger.counts.examples), time.monotonic() - began)


def _settings(config: PreparationConfig, tokenizer: Tokenizer, splitter: str | None) -> dict[str, Any]:
    """Returns everything besides the input that determines the result."""
    return {
        "tokenizer": [tokenizer.type_name, tokenizer.digest],
        "keys": config.json_keys,
        "partitions": 1 if config.keep_sequential_samples else config.partitions,
        "append_eod": config.append_eod,
        "on_error": config.on_error,
        "max_line_bytes": config.max_line_bytes,
        "separator": config.document_separator,
        "sentences": [splitter, config.lang, config.keep_newlines],
    }


# --- processes -------------------------------------------------------------------------------------------------------


def _run(job: Job, workers: int, merger: ShardMerger, journal: Journal, log_interval: int, console: Console) -> None:
    """Starts workers and takes their messages until all blocks are finished or a worker fails."""
    context: Any = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    shared = Shared(
        context.Value("q", 0), context.RawValue("q", block_number(1 << 20, 0)), context.RawArray("q", 3 * workers)
    )
    processes: dict[Connection, Any] = {}
    try:
        with _signals_held():
            for number in range(workers):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=run_worker, args=(number, job, shared, theirs), daemon=True)
                process.start()
                theirs.close()
                processes[ours] = process
        with ProgressDisplay(console, job.plan.total_bytes, log_interval) as display:
            _take_messages(processes, shared, merger, journal, display)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    assert merger.done or merger.fault is not None, "workers ended before the input did"


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Delays SIGINT and SIGTERM during forks, since Python drops exceptions that a handler raises during a fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take_messages(
    processes: dict[Connection, Any], shared: Shared, merger: ShardMerger, journal: Journal, display: ProgressDisplay
) -> None:
    working = dict(processes)
    while working and merger.fault is None:
        for connection in wait(list(working), timeout=_POLL_SECONDS):
            assert isinstance(connection, Connection)
            try:
                message: Message = connection.recv()
            except EOFError:
                process = working.pop(connection)
                process.join()
                _check_ending(process.exitcode)
                continue
            if isinstance(message, Failure):
                if not message.expected:
                    raise RuntimeError(f"a worker failed:\n{message.message}")
                raise (Unfinished if message.resumable else UserError)(message.message)
            journal.record(message)
            merger.take(message)
        display.update(Counts.of_workers(shared.progress))


def _check_ending(exit_code: int) -> None:
    if exit_code < 0:
        hint = "; if memory was short, use fewer --workers" if exit_code == -9 else ""
        raise Unfinished(f"a worker was ended by signal {-exit_code}{hint}; nothing was written")
    assert exit_code == 0, f"a worker ended with code {exit_code}"


# --- files -----------------------------------------------------------------------------------------------------------


def _manifest(job: Job, merger: ShardMerger, key: int, deduplication: str | None) -> DataManifest:
    output = merger.output(key)
    return DataManifest(
        tokenizer=TokenizerRecord.of(job.tokenizer),
        key=job.keys[key],
        level="document" if job.splitter is None else "sentence",
        append_eod=job.eod is not None,
        dtype=np.dtype(job.dtype).name,
        documents=output.counts.documents,
        sequences=output.counts.sequences,
        tokens=output.counts.tokens,
        documents_with_special_literals=output.counts.special_documents,
        special_literals_matched=job.tokenizer.matches_special_literals,
        lines=merger.counts.lines,
        blank_lines=merger.counts.blank_lines,
        dropped_lines=dict(merger.counts.dropped),
        inputs=tuple({"name": Path(file.path).name, "bytes": file.size} for file in job.plan.files),
        files={
            "bin": FileRecord(output.bin_path.stat().st_size, output.bin_sha256),
            "idx": FileRecord(output.idx_path.stat().st_size, sha256_of_file(output.idx_path)),
        },
        sentences=None if job.splitter is None else job.splitter.name,
        deduplication=deduplication,
        cleaning=cleaning_of(file.path for file in job.plan.files),
    )


def _publish(bin_path: Path, idx_path: Path, manifest: DataManifest, prefix: str) -> None:
    """Renames the files. An old index is removed first, so that a .bin file is never beside another file's index."""
    final_bin, final_idx, final_manifest = (
        Path(path) for path in (get_bin_path(prefix), get_idx_path(prefix), get_manifest_path(prefix))
    )
    with open(bin_path, "rb") as file:
        os.fsync(file.fileno())
    final_manifest.unlink(missing_ok=True)
    final_idx.unlink(missing_ok=True)
    os.replace(bin_path, final_bin)
    os.replace(idx_path, final_idx)
    sync_directory(final_bin.parent)
    manifest.write(final_manifest)
