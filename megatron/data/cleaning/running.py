"""Runs tasks in worker processes, in a working folder that survives a kill, and publishes the folder of results."""

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json, sync_directory, write_atomically
from megatron.data.cleaning.config import CleaningConfig
from megatron.data.cleaning.rows import Block, divide, source_of, write_plain_lines
from megatron.data.datasets.object_store import is_url
from megatron.data.preparation.inputs import InputFile, find_inputs
from megatron.data.preparation.manifest import CLEANING_REPORT, cleaning_of
from megatron.data.preparation.resuming import Unfinished, identity_of, working_folder

REPORT = CLEANING_REPORT
_NOT_SETTINGS = ("input", "output", "workers")


def last_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a tool prints last: unreadable lines and the rate, which the report on disk does not have."""
    if report["bad_lines"]:
        yield f"lines that could not be read: {report['bad_lines']:,}"
    if "seconds" in report:
        megabytes, seconds = report["bytes"] / 1e6, report["seconds"]
        yield f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / max(seconds, 1e-9):.1f} MB/s"


def finished_report(output: Path, identity: str) -> dict[str, Any] | None:
    """Returns the report if the same run has finished before; None if the folder is new or empty.

    Raises UserError if the folder holds anything else, which would be mixed with the results.
    """
    try:
        if not output.exists() or not any(output.iterdir()):
            return None
        report = parse_json((output / REPORT).read_bytes())
        if report["identity"] == identity:
            return dict(report)
    except NotADirectoryError:
        raise UserError(f"--output {output}: it is a file; name a new folder") from None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"--output {output}: holds files of something else; name a new folder, or remove this one")


def check_apart(output: Path, files: Sequence[InputFile], inputs: Sequence[str]) -> None:
    """Raises UserError if the output is inside a folder of the input, so that it would be read as input next time."""
    place = output.resolve()
    for name in inputs:
        if os.path.isdir(name) and place.is_relative_to(Path(name).resolve()):
            raise UserError(f"--output {output}: inside --input {name}; name a folder outside of it")
    for file in files:
        if not is_url(file.path) and Path(file.path).resolve().is_relative_to(place):
            raise UserError(f"--output {output}: contains the input {file.path}; name another folder")


def run_tool(
    tool: str,
    config: CleaningConfig,
    warn: Callable[[str], None],
    clean: Callable[[Path, Sequence[Block], Path], Mapping[str, object]],
    other_files: Sequence[InputFile] = (),
    other_settings: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Runs a tool on the input, or does nothing if the same run has finished before. Returns its report.

    `clean(folder, blocks, results)` writes the kept rows of all blocks of the plain lines into the folder of results
    and returns what the report says of them. `other_files` and `other_settings` determine the result too. Raises
    UserError for bad lines, for input without rows, and for files that cannot be read or written.
    """
    assert config.input and config.output
    began = time.monotonic()
    output, key = Path(config.output), config.key
    files = find_inputs(config.input, warn)
    check_apart(output, files, config.input)
    settings = {name: value for name, value in asdict(config).items() if name not in _NOT_SETTINGS}
    identity = identity_of((*files, *other_files), {"tool": tool, **(other_settings or {}), **settings})
    report = finished_report(output, identity)
    if report is not None:
        warn(f"--output {output}: finished before, from the same input with the same flags; nothing was done")
        return report
    with working_folder(config.output, "--output", f"cleaning.{identity}", warn) as working:
        sources = [source_of(file, working.path) for file in files]
        run_tasks(len(sources), config.workers, lambda task: write_plain_lines(sources[task], key))
        results = working.path / "output"
        results.mkdir(exist_ok=True)
        for source in sources:
            (results / source.output_name).unlink(missing_ok=True)
        counts = clean(working.path, divide(sources), results)
        report = {"identity": identity, "tool": tool, "settings": settings, **counts}
        report["inputs"] = [{"name": Path(file.path).name, "bytes": file.size} for file in files]
        report["cleaned_before"] = list(cleaning_of(file.path for file in files))
        write_atomically(results / REPORT, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        os.rename(results, output)  # which is new or an empty folder
        sync_directory(output.parent)
    return {**report, "seconds": time.monotonic() - began}


def refuse_no_rows(config: CleaningConfig, rows: int) -> None:
    """Raises UserError if the input has no rows."""
    if not rows:
        raise UserError(f"--input {' '.join(config.input or ())}: contains no rows")


def run_tasks(count: int, workers: int, work: Callable[[int], None]) -> None:
    """Calls `work` with 0, 1, ..., count - 1, in `workers` forked processes. `work` leaves its results in files.

    Raises the UserError of the first task that raises one, the same for any number of workers.
    """
    if min(workers, count) <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        for task in range(count):
            work(task)
        return
    context = multiprocessing.get_context("fork")
    next_task = context.Value("q", 0)
    failures = context.SimpleQueue()
    parent = os.getpid()
    processes = []
    try:
        for _ in range(min(workers, count)):
            process = context.Process(target=_work, args=(work, count, next_task, failures, parent), daemon=True)
            process.start()
            processes.append(process)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
            process.join()
    found = []
    while not failures.empty():
        found.append(failures.get())
    if found:
        _, expected, message = min(found)
        raise UserError(message) if expected else RuntimeError(f"a worker failed:\n{message}")
    if any(process.exitcode for process in processes):
        raise Unfinished("a worker process was ended; if memory was short, use fewer --workers")


def _work(work: Callable[[int], None], count: int, next_task: Any, failures: Any, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while os.getppid() == parent:
        with next_task.get_lock():
            task = next_task.value
            next_task.value += 1
        if task >= count:
            return
        try:
            work(task)
        except Exception as error:
            # Tasks are taken in order, so all earlier tasks still run to their end and report their errors.
            with next_task.get_lock():
                next_task.value = count
            expected = isinstance(error, UserError | OSError)
            failures.put((task, expected, str(error) if expected else traceback.format_exc()))
            return
