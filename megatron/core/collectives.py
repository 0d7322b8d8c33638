"""The collectives that the library uses, as one reads them: a group of None or of one rank means nothing to do.

Every communication goes through here, so that its type and bytes can be seen in one place (`recorded`). What begins
with `start_` returns at once with a `Pending`; on CUDA the host never waits, kernels that come later do.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

# ---------------------------------------------------------------------------------------------------------------------
# Groups


@dataclass(frozen=True)
class PlannedGroup:
    """A group in a program without other processes, such as a dry run: it knows its ranks and cannot communicate."""

    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    rank: int
    """The place in the group that the program plays."""


Group = ProcessGroup | PlannedGroup | None
"""None is a group of one."""


def group_size(group: Group) -> int:
    """Ranks of a group."""
    if isinstance(group, PlannedGroup):
        return len(group.ranks)
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """This rank's place in a group."""
    if isinstance(group, PlannedGroup):
        return group.rank
    return 0 if group is None else dist.get_rank(group)


def group_ranks(group: Group) -> tuple[int, ...]:
    """Global ranks of a group, in group order."""
    if isinstance(group, PlannedGroup):
        return group.ranks
    return (dist.get_rank() if dist.is_initialized() else 0,) if group is None else tuple(_ranks_of(group))


def _ranks_of(group: ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


# ---------------------------------------------------------------------------------------------------------------------
# What was sent


@dataclass(frozen=True)
class Traffic:
    """One call of one collective on this rank."""

    operation: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive."""
    dtype: torch.dtype
    """Of what goes over the wire."""
    nbytes: int
    """Of the whole tensor: what each rank has after an all_gather and before a reduce_scatter."""
    ranks: tuple[int, ...]
    """Global ranks of the group; of a send or receive, the two ends."""

    @property
    def sent_bytes(self) -> float:
        """What this rank sends, where the algorithm is the one of least traffic (a ring)."""
        n = len(self.ranks)
        share = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0 / n, "send": 1.0, "receive": 0.0}
        return self.nbytes * share.get(self.operation, (n - 1) / n)


_records: list[list[Traffic]] = []


@contextlib.contextmanager
def recorded() -> Iterator[list[Traffic]]:
    """A list that grows by an entry for each communication of this process that begins within."""
    log: list[Traffic] = []
    _records.append(log)
    try:
        yield log
    finally:
        _records[:] = [other for other in _records if other is not log]


def _record(operation: str, tensor: Tensor, ranks: Callable[[], tuple[int, ...]]) -> None:
    if _records:
        entry = Traffic(operation, tensor.dtype, tensor.numel() * tensor.element_size(), ranks())
        for log in _records:
            log.append(entry)


# ---------------------------------------------------------------------------------------------------------------------
# Pending results


class Pending:
    """A communication under way, and the tensor that holds its result once `wait` has returned."""

    def __init__(self, tensor: Tensor, work: Work | None, *kept: Tensor) -> None:
        self.tensor = tensor
        self._work = work
        self._kept = kept
        """Inputs, which must live until the end."""

    def is_done(self) -> bool:
        """It is known to have ended: `wait` would wait for nothing. Some backends know only once waited for."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """The result; on CUDA, ready for kernels of the current stream."""
        if self._work is not None:
            self._work.wait()
            self._work, self._kept = None, ()
        return self.tensor


class HostCopy:
    """Begins to copy; work may be given to the device meanwhile. `wait` gives the numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._copy = tensor

    def wait(self) -> Tensor:
        """The tensor on the host, once what the device was given before the copy is done."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy


def _live(group: Group) -> ProcessGroup | None:
    """The group to communicate over; None where it has one rank."""
    if isinstance(group, PlannedGroup):
        assert len(group.ranks) == 1, f"{group} is only planned: there is nobody to communicate with"
        return None
    return None if group is None or dist.get_world_size(group) == 1 else group


# ---------------------------------------------------------------------------------------------------------------------
# Reductions and copies


def all_reduce(tensor: Tensor, group: Group, op: ReduceOp.RedOpType = ReduceOp.SUM) -> Tensor:
    """Reduce in place over a group; returns the tensor."""
    return start_all_reduce(tensor, group, op).wait()


def start_all_reduce(tensor: Tensor, group: Group, op: ReduceOp.RedOpType = ReduceOp.SUM) -> Pending:
    """Begin a reduction in place."""
    live = _live(group)
    if live is None:
        return Pending(tensor, None)
    _record("all_reduce", tensor, lambda: group_ranks(live))
    return Pending(tensor, dist.all_reduce(tensor, op=op, group=live, async_op=True))


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> Tensor:
    """Copy the tensor of the rank at place `source` of the group to all its ranks, in place; returns the tensor."""
    live = _live(group)
    if live is not None:
        _record("broadcast", tensor, lambda: group_ranks(live))
        dist.broadcast(tensor, src=dist.get_global_rank(live, source), group=live)
    return tensor


def all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """The tensors of all ranks of a group, all of one shape and type, in group order."""
    if _live(group) is None:
        return [tensor]
    return list(gather_rows(tensor.contiguous()[None], group))


def gather_rows(tensor: Tensor, group: Group) -> Tensor:
    """[n, ...] of each rank -> [n * ranks, ...], in group order."""
    return start_gather_rows(tensor, group).wait()


def start_gather_rows(tensor: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """Begin `gather_rows`; into `out`, of which `tensor` may be this rank's part."""
    live = _live(group)
    if live is None:
        if out is None:
            return Pending(tensor, None)
        return Pending(out.copy_(tensor) if out.data_ptr() != tensor.data_ptr() else out, None)
    tensor = tensor.contiguous()
    if out is None:
        out = tensor.new_empty(tensor.shape[0] * dist.get_world_size(live), *tensor.shape[1:])
    _record("all_gather", out, lambda: group_ranks(live))
    return Pending(out, _all_gather_single(out, tensor, group=live, async_op=True), tensor)


def reduce_scatter_rows(tensor: Tensor, group: Group) -> Tensor:
    """[n * ranks, ...] of each rank -> this rank's [n, ...] of their sum."""
    return start_reduce_scatter_rows(tensor, group).wait()


def start_reduce_scatter_rows(
    tensor: Tensor, group: Group, out: Tensor | None = None, op: ReduceOp.RedOpType = ReduceOp.SUM
) -> Pending:
    """Begin `reduce_scatter_rows`; into `out`, which may be this rank's part of `tensor`."""
    live = _live(group)
    if live is None:
        return Pending(tensor if out is None or out.data_ptr() == tensor.data_ptr() else out.copy_(tensor), None)
    tensor = tensor.contiguous()
    if out is None:
        out = tensor.new_empty(tensor.shape[0] // dist.get_world_size(live), *tensor.shape[1:])
    _record("reduce_scatter", tensor, lambda: group_ranks(live))
    return Pending(out, _reduce_scatter_single(out, tensor, op=op, group=live, async_op=True), tensor)


def all_to_all_rows(
    tensor: Tensor, group: Group, output_sizes: Sequence[int] | None = None, input_sizes: Sequence[int] | None = None
) -> Tensor:
    """Part i of the rows goes to rank i; the parts that come are laid end to end in group order. Parts are of equal
    size, or of the sizes given."""
    return start_all_to_all_rows(tensor, group, output_sizes, input_sizes).wait()


def start_all_to_all_rows(
    tensor: Tensor, group: Group, output_sizes: Sequence[int] | None = None, input_sizes: Sequence[int] | None = None
) -> Pending:
    """Begin `all_to_all_rows`."""
    live = _live(group)
    if live is None:
        return Pending(tensor, None)
    tensor = tensor.contiguous()
    rows = tensor.shape[0] if output_sizes is None else sum(output_sizes)
    out = tensor.new_empty(rows, *tensor.shape[1:])
    _record("all_to_all", tensor, lambda: group_ranks(live))
    received = None if output_sizes is None else list(output_sizes)
    sent = None if input_sizes is None else list(input_sizes)
    return Pending(out, dist.all_to_all_single(out, tensor, received, sent, group=live, async_op=True), tensor)


# ---------------------------------------------------------------------------------------------------------------------
# From one rank to another


def start_send(tensor: Tensor, peer: int, group: Group) -> Pending:
    """Begin to send a contiguous tensor to the global rank `peer`, a member of the group."""
    live = _live(group)
    assert live is not None and tensor.is_contiguous()
    _record("send", tensor, lambda: (dist.get_rank(), peer))
    return Pending(tensor, dist.isend(tensor, dst=peer, group=live), tensor)


def start_receive(tensor: Tensor, peer: int, group: Group) -> Pending:
    """Begin to receive from the global rank `peer` into a contiguous tensor. A pair's messages arrive in the order in
    which they were sent."""
    live = _live(group)
    assert live is not None and tensor.is_contiguous()
    _record("receive", tensor, lambda: (peer, dist.get_rank()))
    return Pending(tensor, dist.irecv(tensor, src=peer, group=live))


def start_exchange(tensor: Tensor, to: int, out: Tensor, source: int, group: Group) -> Pending:
    """Begin to send `tensor` to the member at place `to` of the group and to receive `out` from the one at `source`,
    both contiguous and of one type. All members take part, those with nothing to send or to receive with empty tensors.
    """
    live = _live(group)
    assert live is not None and tensor.is_contiguous() and out.is_contiguous()
    ranks = group_ranks(live)
    if tensor.numel():
        _record("send", tensor, lambda: (dist.get_rank(), ranks[to]))
    if out.numel():
        _record("receive", out, lambda: (ranks[source], dist.get_rank()))
    sent = [tensor.numel() if place == to else 0 for place in range(len(ranks))]
    received = [out.numel() if place == source else 0 for place in range(len(ranks))]
    # An all-to-all whose other parts are empty: one launch, where a send and a receive could wait for each other.
    work = dist.all_to_all_single(out.view(-1), tensor.view(-1), received, sent, group=live, async_op=True)
    return Pending(out, work, tensor)


# ---------------------------------------------------------------------------------------------------------------------
# The rest


def averages_in_collective(tensor: Tensor, group: Group) -> bool:
    """The group's backend can average this tensor by itself."""
    return tensor.is_cuda and isinstance(group, ProcessGroup) and "nccl" in dist.get_backend_config(group)


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait for all ranks of a group; None: of the world."""
    if dist.is_available() and dist.is_initialized():
        if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group):
            dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
        else:
            dist.barrier(group=group)


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """A function of torch.distributed that goes by one name or the other, depending on the release."""
    function = getattr(dist, new, None)
    if function is not None:
        return function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(dist, old)


_all_gather_single = _renamed("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
