"""The decisions of --loss-spike-action rewind, in checkpoints and in a file beside them.

A decision leaves the data of a window of iterations out: the run goes back to a checkpoint from before the window, and
does not train on the window when it gets there. Each later checkpoint keeps all decisions. Until there is one, the file
`rewinds.json` in the folder of --save remembers them, so that a run that is killed meanwhile does not forget:

    {"rewinds": [{"spike": 8150, "iteration": 7500, "first": 7951}]}

Checkpoints of the iterations that were given up may still exist. A checkpoint is outdated if it lacks a decision and
was saved inside that decision's window or after it: it has learned from data that is now left out. A resume loads it
only if --ckpt-step names it.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.checkpoint import check_files, open_checkpoint
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint, Manifest, OutdatedCheckpoint
from megatron.core.dist_checkpointing.store_disk import disk_at
from megatron.core.exceptions import UserError
from megatron.core.utils.files import parse_json, read_regular_file
from megatron.core.utils.store_path import place
from megatron.core.utils.stores import StoreError
from megatron.training.config.checkpoint import CheckpointConfig

RECORD = "rewinds.json"


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """One decision to go back."""

    spike: int
    """Iteration whose loss was a spike; the last of the window."""
    iteration: int
    """Iteration of the checkpoint to which the run went back."""
    first: int
    """First iteration of the window."""

    @property
    def window(self) -> tuple[int, int]:
        """First and last iteration whose data is left out."""
        return self.first, self.spike


class Rewinds:
    """The decisions of a run, the oldest first, without repeats."""

    def __init__(self, decisions: Iterable[Rewind] = ()) -> None:
        self.decisions: list[Rewind] = []
        self.add(decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    def add(self, decisions: Iterable[Rewind]) -> None:
        """Adds the decisions whose windows are new."""
        known = self.windows
        for decision in decisions:
            if decision.window not in known:
                self.decisions.append(decision)
                known.append(decision.window)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """First and last iterations of all windows."""
        return [decision.window for decision in self.decisions]

    def leaves_out(self, iteration: int) -> bool:
        """Whether the run does not train on this iteration's data."""
        return any(first <= iteration <= last for first, last in self.windows)

    def missing_in(self, iteration: int, known: "Rewinds") -> Rewind | None:
        """Returns a decision that makes the checkpoint of an iteration outdated; None if there is none. `known` are the
        decisions that the checkpoint keeps."""
        windows = known.windows
        return next((one for one in self.decisions if iteration >= one.first and one.window not in windows), None)

    def describe(self) -> str:
        """Returns the windows in words."""
        windows = [f"{first} to {last}" for first, last in self.windows]
        return " and ".join([", ".join(windows[:-1]), windows[-1]] if len(windows) > 1 else windows)

    def to_json(self) -> list[dict[str, int]]:
        """Returns the decisions for a checkpoint or the file."""
        return [asdict(decision) for decision in self.decisions]

    @classmethod
    def from_json(cls, values: object, source: Path | str) -> "Rewinds":
        """Builds the decisions that `to_json` described. Raises UserError, naming the source, for anything else."""
        found = []
        for value in values if isinstance(values, list) else [None]:
            fields = value if isinstance(value, dict) else {}
            if fields.keys() != {"spike", "iteration", "first"} or not _are_counts(list(fields.values())):
                raise UserError(
                    f"{source} does not hold what a run writes about its loss spikes, but {value!r:.60}; restore it "
                    "from a copy, or delete it, which forgets decisions since the newest checkpoint"
                )
            found.append(Rewind(**fields))
        return cls(found)


def _are_counts(values: Sequence[object]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)


def rewinds_in(manifest: Manifest) -> Rewinds:
    """Returns the decisions that a checkpoint keeps."""
    return Rewinds.from_json(manifest.common.get("rewinds", []), f"the checkpoint of iteration {manifest.iteration}")


def read_record(root: Path) -> Rewinds:
    """Returns the decisions in the file of a folder of checkpoints; none if there is no such file. Raises UserError if
    it cannot be read."""
    path = root / RECORD
    try:
        content = parse_json(read_regular_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return Rewinds()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except StoreError:
        raise
    except ValueError:
        content = None
    return Rewinds.from_json(content.get("rewinds") if isinstance(content, dict) else None, path)


def write_record(root: Path, rewinds: Rewinds) -> None:
    """Replaces the file in one step; without decisions there is none. Raises UserError if that fails."""
    path = root / RECORD
    try:
        if len(rewinds):
            disk = disk_at(root)
            disk.make_directory(root)
            disk.replace_file(path, (json.dumps({"rewinds": rewinds.to_json()}) + "\n").encode())
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


class RewindRecord:
    """The decisions of this run, and where they are kept.

    Args:
        flags: folders of checkpoints.
        say: prints sentences, on the first rank.
    """

    def __init__(self, flags: CheckpointConfig, say: Callable[..., None]) -> None:
        self.flags, self.say = flags, say
        self.rewinds = Rewinds()
        self._earlier: set[int] | None = None
        """Iterations of checkpoints under --save that another run has left there, from which this one does not
        continue. None before it is known whether this run continues from a checkpoint."""
        self._saved: set[int] = set()
        """Iterations of which this process has begun to write a checkpoint under --save."""
        self._has_file = True
        """Whether the file under --save, if there is one, is of this run."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the decisions as every checkpoint of this run keeps them."""
        found: dict[str, Any] = {"rewinds": self.rewinds.to_json()} if len(self.rewinds) else {}
        return found | ({"earlier_run": sorted(self._earlier)} if self._earlier else {})

    def begin_new_run(self) -> None:
        """Treats the checkpoints under --save as those of an earlier run, and says so. Does nothing in a run that
        continues from a checkpoint. Collective."""
        if self._earlier is not None or self.flags.save is None:
            return
        self._earlier, self._has_file = self._iterations_under_save(), False
        if self._earlier:
            self.say(
                f"WARNING: --save {self.flags.save} has checkpoints of an earlier run, up to iteration "
                f"{max(self._earlier)}, and this run does not continue from them. If it ends before its first save, a "
                "later --load of this folder continues the earlier run; another --save avoids this"
            )

    def _iterations_under_save(self) -> set[int]:
        root = place(self.flags.save or "")

        found = RankCoordinator().run_on_first(lambda: [folder.step for folder in folders.candidates(root)])
        return {step for step in found if isinstance(step, int)}

    def is_in_save(self, folder: Path, *, temporary: bool = False) -> bool:
        """Whether the folder of a checkpoint is in that of --save, links resolved. With `temporary` also whether it is
        in the folder of its temporary checkpoints. The first rank decides, because links may lead elsewhere on other
        nodes. Collective."""
        save = self.flags.save
        if save is None:
            return False
        roots = [place(save), temporary_folder(self.flags, save) if temporary else None]
        own = [root for root in roots if root is not None]
        return RankCoordinator().run_on_first(lambda: folder.parent.resolve() in [root.resolve() for root in own])

    # Loading ---------------------------------------------------------------------------------------------------------

    def refusing_outdated(self, *roots: Path | str | None) -> Callable[[Manifest], None]:
        """Returns a function that raises OutdatedCheckpoint for a checkpoint which lacks a decision in the files of
        these folders. Collective."""
        decided = self._read(*roots)

        def refuse(manifest: Manifest) -> None:
            for path, rewinds in decided.items():
                _refuse_outdated(manifest, rewinds, f" ({path}; delete this file if it is of another run)")

        return refuse

    def go_on_from(self, folder: Path, manifest: Manifest) -> None:
        """Takes over the decisions in a checkpoint, those in the file beside it and those in the file under --save. The
        run may have begun anew before: a script may look for a checkpoint in several folders. Collective."""
        self._earlier, self._has_file = self._left_by_another_run(folder, manifest) - self._saved, True
        known, before = rewinds_in(manifest), len(self.rewinds)
        self.rewinds.add(known.decisions)
        for decided in self._read(folder.parent, self.flags.save).values():
            self.rewinds.add(decided.decisions)
        if len(self.rewinds) > before:
            windows = self.rewinds.describe()
            self.say(f"after loss spikes, the data of iterations {windows} is left out (--loss-spike-action rewind)")
        missing = self.rewinds.missing_in(manifest.iteration, known)
        if missing is not None:
            self.say(
                f"WARNING: {folder} has learned from data of iterations {missing.first} to {missing.spike}, although "
                f"the run has gone back from the loss spike in iteration {missing.spike}; it is loaded as asked for"
            )

    def _left_by_another_run(self, folder: Path, manifest: Manifest) -> set[int]:
        """Returns the iterations of checkpoints under --save that belong to another run than the one that this run
        continues. The loaded checkpoint names them; if it is not in the folder of --save, they are all iterations
        there."""
        if self.flags.save is None:
            return set()
        if not self.is_in_save(folder, temporary=True):
            return self._iterations_under_save()
        named = manifest.common.get("earlier_run", [])
        return set(named) if isinstance(named, list) and _are_counts(named) else set()

    def _read(self, *roots: Path | str | None) -> dict[str, Rewinds]:
        """Returns the decisions in the files of these folders by the path of the file, as the first rank reads them.
        Collective."""

        def read() -> dict[str, list[dict[str, int]]]:
            return {str(place(root) / RECORD): read_record(place(root)).to_json() for root in roots if root is not None}

        found = RankCoordinator().run_on_first(read)
        return {path: Rewinds.from_json(values, path) for path, values in found.items()}

    # Going back ------------------------------------------------------------------------------------------------------

    def newest_before(self, iteration: int) -> tuple[Path, int] | None:
        """Returns folder and iteration of this run's newest complete checkpoint that is older than an iteration and not
        outdated; None if there is none. It looks under --save and --load. With --finetune the checkpoints under --load
        belong to another run. Those that an earlier run has left under --save do not count either."""
        roots = [self.flags.save, None if self.flags.finetune else self.flags.load]
        found = [
            (each, place(root)) for root in dict.fromkeys(roots) if root for each in folders.candidates(place(root))
        ]
        for folder, root in sorted(found, key=lambda each: each[0].iteration, reverse=True):
            step = folder.step
            is_of_another = root == place(self.flags.save or "") and step in (self._earlier or ())
            if isinstance(step, int) and step < iteration and not is_of_another and self._is_usable(folder.path):
                return root, step
        return None

    def _is_usable(self, folder: Path) -> bool:
        try:
            checkpoint = open_checkpoint(folder)
            check_files(checkpoint)
            _refuse_outdated(checkpoint.manifest, self.rewinds)
        except BrokenCheckpoint:
            return False
        return checkpoint.manifest.weights_finite is not False

    # Writing ---------------------------------------------------------------------------------------------------------

    def begin_save(self, iteration: int) -> None:
        """Deletes the file of an earlier run in the folder of --save, unless this run continues from that one. Called
        before the checkpoint of an iteration is written there. Collective."""
        self.begin_new_run()
        if not self._has_file:
            RankCoordinator().run_on_first(self._forget_earlier_run)
            self._has_file = True
        self._saved.add(iteration)
        if self._earlier is not None:
            self._earlier.discard(iteration)

    def _forget_earlier_run(self) -> None:
        root = place(self.flags.save or "")
        if (root / RECORD).exists():
            self.say(f"{root / RECORD} is deleted: it is of an earlier run, from which this one does not continue")
            write_record(root, Rewinds())

    def write(self, iteration: int) -> None:
        """Writes all decisions into the folder of --save, and makes an iteration the newest one that --load finds
        there: sets the tracker file back and deletes newer temporary checkpoints. Collective."""
        RankCoordinator().run_on_first(partial(self._write, iteration))

    def _write(self, iteration: int) -> None:
        assert self.flags.save is not None
        root, temporary, disk = (
            place(self.flags.save),
            temporary_folder(self.flags, self.flags.save),
            disk_at(place(self.flags.save)),
        )
        write_record(root, self.rewinds)
        try:
            folders.write_tracker(disk, root, iteration)
            for folder in folders.candidates(temporary) if temporary is not None else ():
                if folder.iteration > iteration:
                    folders.delete(disk, folder.path)
        except OSError as error:
            raise _cannot_write(root, error) from error


def temporary_folder(flags: CheckpointConfig, root: str) -> Path | None:
    """Returns the folder of the temporary checkpoints that belong to those in `root`; None if there is none that all
    ranks share."""
    if flags.non_persistent_save_interval is None or flags.non_persistent_ckpt_type == "local":
        return None
    return place(flags.non_persistent_global_ckpt_dir or place(root) / "non_persistent")


def _refuse_outdated(manifest: Manifest, decided: Rewinds, source: str = "") -> None:
    missing = decided.missing_in(manifest.iteration, rewinds_in(manifest))
    if missing is not None:
        raise OutdatedCheckpoint(
            folders.folder_name(manifest.iteration),
            f"it has learned from data of iterations {missing.first} to {missing.spike}, and is older than the "
            f"decision to go back from the loss spike in iteration {missing.spike}{source}",
        )


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: {error.strerror}; the run cannot go back from a loss spike (--loss-spike-action "
        "rewind); its checkpoints are untouched"
    )
