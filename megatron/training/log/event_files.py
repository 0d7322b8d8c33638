"""Moves points of TensorBoard's files aside that a resumed run writes again.

TensorBoard itself hides points by their step only (`purge_step`). The tags "vs samples" count samples as steps, so that
all their earlier points would disappear, too.

A file of events is a sequence of records: u64 length, u32 checksum of the length, the event, u32 checksum of the event.
"""

import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

VS_SAMPLES = " vs samples"
_LENGTH = struct.Struct("<Q")
_OF_EVALUATION = re.compile(r" (validation(-.*)?|test(-.*)?)( ppl)?$|^eval/")


def supersede_events(folder: Path, iteration: int, samples: int, evaluates_again: bool = False) -> Iterator[str]:
    """Cuts each file of events in a folder before the first point that a run writes after this iteration, which had
    trained on so many samples. With `evaluates_again`, losses of evaluations of this iteration count as such points.
    The rest goes to a file that TensorBoard does not read. Yields a sentence for each file that is cut.

    Only points that exist with and without "vs samples" decide about the cut, because a script's own points may have
    steps of another unit. Raises OSError if a file cannot be changed.
    """
    for path in sorted(folder.glob("*tfevents*")):
        cut, kept, points = _find_cut(path, iteration, samples, evaluates_again)
        if cut is None:
            continue
        aside = path.with_name(path.name.replace("tfevents", f"superseded-{iteration}"))
        if kept:
            with open(path, "r+b") as file:
                file.seek(cut)
                with open(aside, "ab") as rest:
                    shutil.copyfileobj(file, rest)
                file.truncate(cut)
        else:  # another run may still write into this file
            path.rename(aside)
        yield f"{path}: {points} points beyond iteration {iteration}: moved to {aside}"


def _find_cut(path: Path, iteration: int, samples: int, evaluates_again: bool) -> tuple[int | None, int, int]:
    """Returns the offset of the cut (None: nothing is superseded), and the number of points before and after it."""
    first: dict[str, tuple[int, int]] = {}
    total = 0
    for offset, tag, step in _points(path):
        plain = tag.removesuffix(VS_SAMPLES)
        last = samples if tag != plain else iteration
        if step > last - (evaluates_again and _OF_EVALUATION.search(plain) is not None):
            first.setdefault(tag, (offset, total))
        total += 1
    both = [first[tag] for tag in first if tag + VS_SAMPLES in first]
    if not both:
        return None, total, 0
    cut, kept = min(both)
    return cut, kept, total - kept


def _points(path: Path) -> Iterator[tuple[int, str, int]]:
    """Yields offset, tag and step of each point in a file, up to the first incomplete or damaged record."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    with open(path, "rb") as file:
        offset, size = 0, os.fstat(file.fileno()).st_size
        while len(head := file.read(12)) == 12:
            (length,) = _LENGTH.unpack_from(head)
            if offset + 16 + length > size:
                return
            try:
                event = Event.FromString(file.read(length + 4)[:-4])
            except DecodeError:
                return
            for value in event.summary.value:
                yield offset, value.tag, event.step
            offset += 16 + length
