"""Writes local copies (`local_copies`) on one rank, sends them to other ranks, and retires older ones.

What is retired becomes a spare: its data file is written over by the next copy. New pages of host memory take several
times as long to write as pages that are in use already.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.core.communication.collectives import start_exchange
from megatron.core.dist_checkpointing import file_pieces, folders
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.disk import Disk, cannot_write
from megatron.core.dist_checkpointing.file_pieces import FileReceiver, FileSender, PieceBuffers
from megatron.core.dist_checkpointing.local_runs import SPARE
from megatron.core.dist_checkpointing.manifest import MANIFEST, FileDigest, Manifest, data_name, index_name, read_bytes
from megatron.core.dist_checkpointing.planning import assign_writes
from megatron.core.dist_checkpointing.rank_file import write_rank
from megatron.core.exceptions import UserError

Announce = Callable[[int, float, float], None]
"""Told the bytes of a copy, its seconds, and those of them for which training waited."""


@dataclass(frozen=True)
class CopyWriter:
    """Writes, sends and retires the copies under `root`. All methods but `place_of` are collective over `ranks`; a
    thread needs ranks with a group of its own. `offsets` are distances to the ranks that get copies."""

    root: Path
    ranks: RankCoordinator
    offsets: Sequence[int]
    disk: Disk

    def place_of(self, rank: int) -> Path:
        """Returns the folder of this rank's copies of the state of `rank`."""
        return self.root / f"of_rank_{rank:05d}" / f"by_rank_{self.ranks.rank:05d}"

    def save(self, chunks: Sequence[Chunk], manifest: Manifest) -> int:
        """Writes this rank's copy, sends it to the ranks that keep one, and retires older copies, once all ranks have
        theirs. Returns the bytes of this rank's files. Raises UserError on all ranks if a rank cannot write; older
        copies then stay, and no partial files remain."""
        step, rank, size = manifest.iteration, self.ranks.rank, self.ranks.size
        folder = self.place_of(rank) / folders.folder_name(step)
        nbytes = self.ranks.run_on_all(lambda: self._write(folder, chunks, manifest))
        for offset in self.offsets:
            self.exchange(folder, (rank + offset) % size, (rank - offset) % size, step)
        self.ranks.run_on_all(lambda: self._retire_others(step))
        self.ranks.run_on_all(lambda: self._delete_left(step))
        return nbytes

    def _write(self, folder: Path, chunks: Sequence[Chunk], manifest: Manifest) -> int:
        temporary = self._new_folder(folder, self.ranks.rank)
        try:
            write_rank(self.disk, temporary, self.ranks.rank, assign_writes(chunks, self.ranks.global_rank), over=True)
            index = temporary / index_name(self.ranks.rank)
            whole = replace(manifest, indexes={index.name: FileDigest.of(read_bytes(index))})
            self.disk.write_file(temporary / MANIFEST, whole.to_bytes())
            nbytes = sum(path.stat().st_size for path in temporary.iterdir())
            self._give_name(temporary, folder)
        except OSError as error:
            self.disk.discard(temporary)
            raise cannot_write(folder, error) from error
        except BaseException:
            self.disk.discard(temporary)
            raise
        return nbytes

    def _new_folder(self, folder: Path, whose: int) -> Path:
        """Removes what killed saves have left beside a folder, and returns the one that a save of the state of `whose`
        writes into. It is empty, or has the data file of the spare."""
        spare = folder.parent / SPARE
        try:
            self.disk.make_directory(folder.parent)
            folders.clean(self.disk, folder.parent)
            if not spare.is_dir():
                return self.disk.new_folder(folder)
            temporary = folders.sibling_name(folder, "tmp")
            self.disk.rename(spare, temporary)
            for path in temporary.iterdir():
                if path.name != data_name(whose):
                    self.disk.remove_file(path)
            return temporary
        except OSError as error:
            raise cannot_write(folder, error) from error

    def _give_name(self, temporary: Path, folder: Path) -> None:
        self.disk.sync_directory(temporary)
        folders.rename_into_place(self.disk, temporary, folder)

    # Sending ---------------------------------------------------------------------------------------------------------

    def exchange(self, folder: Path | None, to: int, source: int, step: int, whose: int | None = None) -> Path | None:
        """Sends the files in a folder to rank `to`, and receives from rank `source` a copy of the state of `whose`
        (default: of `source`). Without a folder nothing is sent. Returns the folder that was received; None if the
        other rank had nothing to send. Raises UserError on all ranks if one cannot read or write."""
        ranks, whose = self.ranks, source if whose is None else whose
        paths = [] if folder is None else sorted(folder.iterdir())
        offers = ranks.gather([to, [[path.name, path.stat().st_size] for path in paths]])
        incoming = offers[source][1] if offers[source][0] == ranks.rank else []
        target = self.place_of(whose) / folders.folder_name(step)
        temporary = ranks.run_on_all(lambda: self._new_folder(target, whose) if incoming else None)
        try:
            received = ranks.run_on_all(
                lambda: None if temporary is None else FileReceiver(self.disk, temporary, incoming)
            )
            sender = FileSender(paths)
            most = max(sum(size for _, size in files) for _, files in offers)
            self._pass_pieces(-(-most // file_pieces.PIECE_BYTES), sender, to, received, source)
            ranks.run_on_all(sender.finish)
            ranks.run_on_all(lambda: self._keep(temporary, target, received))
        except BaseException:
            if temporary is not None:
                self.disk.discard(temporary)
            raise
        return target if incoming else None

    def _pass_pieces(self, count: int, sender: FileSender, to: int, received: FileReceiver | None, source: int) -> None:
        """Sends and receives pieces. While one is on its way, the next one is read, and the one before is written."""
        ranks = self.ranks
        buffers = PieceBuffers(0 if received is None else received.left)
        piece, arrived = sender.next(), torch.empty(0, dtype=torch.uint8)
        for _ in range(count):
            out = buffers.next().to(ranks.device)
            pending = start_exchange(piece.to(ranks.device), to, out, source, ranks.group)
            if received is not None:
                received.take(arrived)
            piece = sender.next()
            arrived = pending.wait().cpu()
        if received is not None:
            received.take(arrived)

    def _keep(self, temporary: Path | None, target: Path, received: FileReceiver | None) -> None:
        """Ends what `FileReceiver` has begun. Raises UserError if it could not write."""
        if temporary is None or received is None:
            return
        try:
            received.finish()
            self._give_name(temporary, target)
        except OSError as error:
            raise cannot_write(target, error) from error

    # Older copies ----------------------------------------------------------------------------------------------------

    def _retire_others(self, step: int) -> None:
        """Retires the copies that this rank has written, except for those of an iteration. One of each rank's state
        becomes the spare, the others are deleted."""
        for place in self.root.glob(f"of_rank_*/by_rank_{self.ranks.rank:05d}"):
            for folder in folders.list_folders(place):
                if folder.step == step:
                    continue
                if folder.state is not None or (place / SPARE).exists():
                    folders.delete(self.disk, folder.path)
                    continue
                self.disk.rename(folder.path, place / SPARE)
                self.disk.sync_directory(place)  # before anything in it is written over

    def _delete_left(self, step: int) -> None:
        """Deletes what is left on this host of older iterations: by ranks that are on another host now, or that a
        smaller run lacks. Several ranks may meet here."""
        for place in self.root.glob("of_rank_*/by_rank_*"):
            with contextlib.suppress(OSError, UserError):
                for folder in folders.list_folders(place):
                    if folder.iteration < step:
                        folders.delete(self.disk, folder.path)
                if not (place / folders.folder_name(step)).exists() and (place / SPARE).exists():
                    self.disk.remove_tree(place / SPARE)


class PendingCopies:
    """Local copies that a thread of each rank writes and sends. Every rank calls `finish` once.

    Args:
        ranks: of the main thread.
        save: what the thread does (`CopyWriter.save`).
        started: when training began to wait (`time.monotonic`).
        announce: called in the thread, once the copies of all ranks are complete, with the bytes of this rank's files,
            the seconds since `started`, and those until the thread started.
    """

    def __init__(self, ranks: RankCoordinator, save: Callable[[], int], started: float, announce: Announce) -> None:
        self._ranks, self._save, self._announce = ranks, save, announce
        self._failure: Exception | None = None
        self._started, self._paused = started, time.monotonic() - started
        self._thread = threading.Thread(target=self._run, name="local copies", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Waits until this rank's thread has ended, but not longer. Not collective."""
        self._thread.join(seconds)

    def finish(self) -> None:
        """Waits until the copies of all ranks are complete. Collective. If one rank has failed, all ranks raise
        UserError, and older copies stay."""
        self._thread.join()
        self._ranks.run_on_all(self._raise_failure)

    def _run(self) -> None:
        try:
            nbytes = self._save()
            self._announce(nbytes, time.monotonic() - self._started, self._paused)
        except Exception as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
