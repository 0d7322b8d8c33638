"""Measures memory and traffic of a layout:   torchrun --nproc_per_node 4 benchmarks/measure_layout.py FLAGS OF A RUN

Sets the run up like pretrain_gpt.py, trains two steps and prints three results for the second step: the bytes that
ranks hold between steps (weights, gradients, optimizer), the bytes that the forward pass of one micro-batch stores for
backward, and the communication of the rank that sends most. Communication is listed by group, operation and type, with
the number of calls, the bytes of the tensors and the bytes that the rank sends with a ring algorithm. Data is random
unless the flags name some.
"""

import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import pretrain_gpt
from benchmarks.measuring import after_one_step
from megatron.core.communication.traffic import Traffic, recorded
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.utils.torch_private import TorchDispatchMode, tree_leaves
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.errors import exit_with_problems
from megatron.training.loop import train_step
from megatron.training.providers import ForwardStep, Providers
from megatron.training.trainer import Trainer

PROVIDERS = Providers(pretrain_gpt.build_model, pretrain_gpt.build_datasets, pretrain_gpt.build_forward_step)
RANDOM_DATA = "--mock-data --tokenizer-type NullTokenizer --train-iters 2 --eval-iters 0 --lr 1e-4"
_GROUPS = ("tp", "cp", "pp", "dp", "dp_cp", "embd", "intra_dp_cp", "inter_dist_opt", "mp", "tp_cp", "tp_dp_cp")
"""Names of groups. A set of ranks gets the first name that matches."""


def main(argv: Sequence[str] | None = None, launch_environment: LaunchEnvironment | None = None) -> int:
    """Runs the tool on this rank and returns its exit code. `launch_environment` replaces that of the process."""
    try:
        given = sys.argv[1:] if argv is None else argv
        words = [*f"{RANDOM_DATA} --num-workers 0 --log-interval 1000".split(), *given]
        config = configure(words, launch_environment=launch_environment)
        with after_one_step(config, PROVIDERS) as trainer:
            kept: list[int] = []
            trainer.forward_step = _measured(trainer.forward_step, kept)
            with recorded() as traffic:
                result = train_step(trainer)
            trainer.record_step(result)
            everyone = RankCoordinator().gather(
                {"memory": memory_of(trainer, kept), "traffic": rows_of(traffic, trainer.environment.groups)}
            )
            if trainer.environment.is_first:
                print(*lines(everyone), sep="\n", flush=True)
    except UserError as error:
        exit_with_problems(error)
    return 0


class LiveStorages(TorchDispatchMode):
    """Context that records the storages of all results of operations. `nbytes` is the size of those still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._older: dict[int, StorageWeakRef] = {}
        """Storages from before the context: weights, data. The references keep their addresses from being reused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._made:
                self._older[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._older:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded storages that are still in use."""
        gc.collect()
        time.sleep(0.1)  # threads that have just sent something may hold a storage
        return sum(nbytes for reference, nbytes in self._made.values() if not reference.expired())


def _measured(step: ForwardStep, kept: list[int]) -> ForwardStep:
    """Wraps a forward step. Its first call of a training step appends the bytes that it leaves in memory to `kept`."""

    def forward_step(data: Any, model: nn.Module) -> Any:
        if kept:
            return step(data, model)
        with LiveStorages() as live:
            output = step(data, model)
        kept.append(live.nbytes)
        return output

    return forward_step


def memory_of(trainer: Trainer, kept: Sequence[int]) -> dict[str, int]:
    """Returns the bytes of this rank's buffers between steps, and of the activations of a micro-batch."""
    units = [unit for chunk in trainer.model for unit in chunk.units]
    storages = {unit.grad_buffer.untyped_storage().data_ptr(): unit.grad_buffer.untyped_storage() for unit in units}
    storages |= {u.gradient_shard.untyped_storage().data_ptr(): u.gradient_shard.untyped_storage() for u in units}
    return {
        "weights": sum(unit.weight_bytes for unit in units),
        "gradients": sum(storage.nbytes() for storage in storages.values()),
        "optimizer": sum(chunk.flat.nbytes for chunk in trainer.optimizer.state_chunks()),
        "activations": sum(kept),
    }


def rows_of(traffic: Sequence[Traffic], groups: ProcessGroupCollection) -> list[list[Any]]:
    """Returns rows of group, operation, type, number of calls, bytes, and bytes sent."""
    calls: Counter[tuple[str, str, str]] = Counter()
    nbytes, sent = Counter(calls), Counter(calls)
    for entry in traffic:
        key = _name(entry, groups), entry.operation, str(entry.dtype).removeprefix("torch.")
        calls[key] += 1
        nbytes[key] += entry.nbytes
        sent[key] += round(entry.sent_bytes)
    return [[*key, calls[key], nbytes[key], sent[key]] for key in sorted(calls)]


def _name(entry: Traffic, groups: ProcessGroupCollection) -> str:
    if entry.operation in ("send", "receive"):
        return "cp" if set(entry.ranks) <= set(groups.ranks("cp")) else "pp"
    fitting = (name for name in _GROUPS if set(groups.ranks(name)) == set(entry.ranks) and groups.size(name) > 1)
    return next(fitting, f"{len(entry.ranks)} ranks")


def lines(everyone: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of the report; `everyone` has the numbers of each rank."""
    yield f"{'bytes per rank':14} {'least':>14} {'most':>14}"
    for name in ("weights", "gradients", "optimizer", "activations"):
        values = [rank["memory"][name] for rank in everyone]
        note = "  (forward pass of one micro-batch)" if name == "activations" else ""
        yield f"{name:14} {min(values):14,} {max(values):14,}{note}"
    sent = [sum(row[-1] for row in rank["traffic"]) for rank in everyone]
    fullest = max(range(len(sent)), key=lambda rank: sent[rank])
    yield f"traffic of a step on rank {fullest}, which sends the most: {sent[fullest]:,} bytes"
    for group, operation, dtype, calls, nbytes, out in everyone[fullest]["traffic"]:
        yield f"  {group:8} {operation:15} {dtype:9} {calls:5} calls {nbytes:14,} bytes {out:14,} sent"


if __name__ == "__main__":
    run_main(main)
