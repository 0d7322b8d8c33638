"""Temporary checkpoints on the hosts of the ranks (--non-persistent-ckpt-type local)."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.async_saving import StagingMemory
from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.local_copies import LocalCopies, copy_offsets, root_of_run
from megatron.core.dist_checkpointing.local_writing import PendingCopies
from megatron.core.exceptions import UserError
from megatron.core.utils.store_path import place
from megatron.training.checkpoint_checks import refuse_non_finite_weights
from megatron.training.config.checkpoint import CheckpointConfig


def local_copies(flags: CheckpointConfig, layout: Mapping[str, int], say: Callable[[str], None]) -> LocalCopies | None:
    """Returns the local copies of a run; None if its flags ask for none. `layout` has the sizes of its process groups,
    and `say` prints a sentence on the first rank. Those of other runs that no run will read again are deleted.
    Collective."""
    directory = flags.non_persistent_local_ckpt_dir
    if flags.save is None or flags.non_persistent_save_interval is None or directory is None:
        return None
    ranks, offsets = RankCoordinator(), tuple[int, ...]()
    if flags.replication and ranks.size > 1:
        assert flags.replication_jump is not None, "a derived value"
        offsets = copy_offsets(ranks.size, flags.replication_jump, flags.replication_factor)
    root = root_of_run(Path(directory), place(flags.save), ranks)
    local = LocalCopies(root, ranks, layout, offsets, say, save=place(flags.save))
    local.delete_outdated(refuse_non_finite_weights)
    return local


def save_local(
    local: LocalCopies, chunks: Iterable[Chunk], facts: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Writes local copies of a state, which `chunks` and `facts` (arguments of `writing.save`) describe. If a rank
    cannot write, training goes on: a run can always resume from its checkpoints under --save. Collective."""
    iteration, started = facts["step"], time.monotonic()
    try:
        nbytes = local.save(chunks, **_facts_of_copies(facts))
    except UserError as error:
        say(_failure(iteration, error))
        return
    say(_success(local, iteration, nbytes, f"{time.monotonic() - started:.2f} s"))


class PendingLocalSave:
    """Local copies that threads write. Every rank calls `finish` once."""

    def __init__(self, pending: PendingCopies, iteration: int, say: Callable[[str], None]) -> None:
        self._pending, self._iteration, self._say = pending, iteration, say

    def wait(self, seconds: float) -> None:
        """Waits until this rank's thread has ended, but not longer. Not collective."""
        self._pending.wait(seconds)

    def finish(self) -> None:
        """Waits until the copies of all ranks are complete. If a rank could not write, says so. Collective."""
        try:
            self._pending.finish()
        except UserError as error:
            self._say(_failure(self._iteration, error))


def begin_local_save(
    local: LocalCopies,
    chunks: Iterable[Chunk],
    memory: StagingMemory,
    facts: Mapping[str, Any],
    say: Callable[[str], None],
    started: float,
) -> PendingLocalSave:
    """Copies a state to `memory`, and starts the threads that do the rest of `save_local`. Training has waited since
    `started` (`time.monotonic`). Collective."""

    def announce(nbytes: int, seconds: float, paused: float) -> None:
        say(_success(local, facts["step"], nbytes, f"{seconds:.2f} s, of which training waited for {paused:.2f} s"))

    pending = local.begin_save(chunks, memory, **_facts_of_copies(facts), started=started, announce=announce)
    return PendingLocalSave(pending, facts["step"], say)


def _facts_of_copies(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: facts[name] for name in ("step", "common", "config", "weights_finite")}


def _success(local: LocalCopies, iteration: int, nbytes: int, times: str) -> str:
    copies = f", on {1 + len(local.offsets)} ranks" if local.offsets else ""
    return (
        f"local copies of iteration {iteration:7d} are in {local.root} "
        f"({nbytes / 1e6:.1f} MB of rank 0{copies}, in {times})"
    )


def _failure(iteration: int, error: UserError) -> str:
    return f"WARNING: no local copies of iteration {iteration:7d}, and training goes on: {error}"
