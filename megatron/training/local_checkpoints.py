"""Temporary checkpoints on the hosts of the ranks (--non-persistent-ckpt-type local)."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.local_copies import LocalCopies, copy_offsets, root_of_run
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
        nbytes = local.save(chunks, **{name: facts[name] for name in ("step", "common", "config", "weights_finite")})
    except UserError as error:
        say(f"WARNING: no local copies of iteration {iteration:7d}, and training goes on: {error}")
        return
    copies = f", on {1 + len(local.offsets)} ranks" if local.offsets else ""
    size = f"{nbytes / 1e6:.1f} MB of rank 0{copies}, in {time.monotonic() - started:.2f} s"
    say(f"local copies of iteration {iteration:7d} are in {local.root} ({size})")
