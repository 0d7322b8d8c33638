"""Runs tasks in worker processes, in a working folder that survives a kill, and publishes the folder of results."""

import contextlib
import glob
import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json, sync_directory
from megatron.data.datasets.object_store import is_url
from megatron.data.preparation.inputs import InputFile
from megatron.data.preparation.manifest import CLEANING_REPORT, cleaning_of
from megatron.data.preparation.resuming import lock_folder

REPORT = CLEANING_REPORT


def last_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a tool prints last: unreadable lines and the rate, which the report on disk does not have."""
    if report["bad_lines"]:
        yield f"lines that could not be read: {report['bad_lines']:,}"
    if "seconds" in report:
        megabytes, seconds = report["bytes"] / 1e6, report["seconds"]
        yield f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / max(seconds, 1e-9):.1f} MB/s"


def facts_of_input(files: Sequence[InputFile]) -> dict[str, object]:
    """Returns what a report says about the input."""
    return {
        "inputs": [{"name": Path(file.path).name, "bytes": file.size} for file in files],
        "cleaned_before": list(cleaning_of(file.path for file in files)),
    }


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


@contextlib.contextmanager
def working_folder(output: Path, identity: str, warn: Callable[[str], None]) -> Iterator[Path]:
    """Makes and locks a folder beside the output. It is removed at the end and after an error of the input; it stays
    after an interruption, and after an error of the system such as a full disk. The next run continues from it."""
    folder = output.parent / f".{output.name}.cleaning.{identity}"
    hint = f"the finished part is kept in {folder}: the same command continues from there; or remove the folder"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        others = [path for path in output.parent.glob(f".{glob.escape(output.name)}.cleaning.*") if path != folder]
        if others:
            warn(f"{others[0]}: left by a killed run with other input or flags (then remove it), or in use")
        with lock_folder(folder, warn):
            try:
                yield folder
            except UserError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}; {hint}") from None
    except WorkerKilled as error:
        raise UserError(f"{error}; {hint}") from None


def publish(folder: Path, output: Path) -> None:
    """Renames the folder of results to its final name, which is new or an empty folder."""
    os.rename(folder, output)
    sync_directory(output.parent)


class WorkerKilled(Exception):
    """A worker process was ended by a signal."""


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
        raise WorkerKilled("a worker process was ended; if memory was short, use fewer --workers")


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
