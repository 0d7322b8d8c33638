"""All collectives of the library. With a group of None, or of one rank, they do nothing.

Every communication goes through this module, so that `traffic.recorded` sees its type and bytes.
Functions whose name begins with `start_` return at once with a `Pending`. On CUDA later kernels wait, never the
host.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from megatron.core.communication.traffic import record_traffic
from megatron.core.utils.activity import Call, Channel, activity

# ---------------------------------------------------------------------------------------------------------------------
# Groups


@dataclass(frozen=True)
class PlannedGroup:
    """A group in a program without other processes, such as a dry run: it knows its ranks but cannot communicate. On
    the meta device its collectives return tensors of the right shapes, so that memory can be counted."""

    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    rank: int
    """Rank in the group of the process that the program simulates."""


Group = ProcessGroup | PlannedGroup | None
"""None is a group of one."""


def group_size(group: Group) -> int:
    """Returns the number of ranks of a group."""
    if isinstance(group, PlannedGroup):
        return len(group.ranks)
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """Returns this process's rank in a group."""
    if isinstance(group, PlannedGroup):
        return group.rank
    return 0 if group is None else dist.get_rank(group)


def group_ranks(group: Group) -> tuple[int, ...]:
    """Returns the global ranks of a group, in group order."""
    if isinstance(group, PlannedGroup):
        return group.ranks
    return (
        (dist.get_rank() if dist.is_initialized() else 0,)
        if group is None
        else tuple(dist.get_process_group_ranks(group))
    )


def _record(
    operation: str,
    tensor: Tensor,
    live: ProcessGroup | PlannedGroup,
    pair: tuple[int, int] | None = None,
    kept_rows: int | None = None,
) -> Call | None:
    """Counts a call, and records its traffic; None for a planned group. `pair` is the (sender, receiver) of a message,
    `kept_rows` as in `record_traffic`."""
    if isinstance(live, PlannedGroup):
        return None

    def ranks() -> tuple[int, ...]:
        return pair or group_ranks(live)

    record_traffic(operation, tensor, ranks, kept_rows)
    return activity.begin(operation, pair or live.group_name, ranks)


# ---------------------------------------------------------------------------------------------------------------------
# Pending results


class Pending:
    """A communication in progress, and its result."""

    def __init__(
        self, tensor: Tensor, work: "Work | _Messages | None", *kept: Tensor, call: Call | None = None
    ) -> None:
        self.tensor = tensor
        """Has the result after `wait`."""
        self._finish: Callable[[Tensor], Tensor] | None = None
        self._work = work
        self._call = call
        self._kept = kept
        """Other tensors of the communication, which must live until its end."""

    def is_done(self) -> bool:
        """Whether the communication is known to have ended. With some backends this is known only after `wait`."""
        return self._work is None or self._work.is_completed()

    def then(self, finish: Callable[[Tensor], Tensor]) -> "Pending":
        """Lets `wait` return finish(what has arrived). Returns self."""
        self._finish = finish
        return self

    def wait(self) -> Tensor:
        """Returns the result; on CUDA, ready for later kernels of the current stream. Raises RuntimeError if the
        communication has failed, for example because another rank has ended."""
        if self._work is not None:
            if self._call is None:
                self._work.wait()
            else:
                with activity.waiting(self._call):
                    self._work.wait()
            self._work, self._kept = None, ()
        if self._finish is not None:
            self.tensor, self._finish = self._finish(self.tensor), None
        return self.tensor


class _Messages:
    """Messages between ranks in progress, as one."""

    def __init__(self, messages: Sequence[Work]) -> None:
        self._messages = messages

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(message.is_completed() for message in self._messages)

    def wait(self) -> None:
        """Waits until all have ended."""
        for message in self._messages:
            message.wait()


_OWN_DEVICE = Call(Channel("device", ()), 0, "the device")
"""The call of a thread that waits for its own device."""


class HostCopy:
    """A small tensor that is being copied to the host. The host can queue further work on the device before `wait`."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda and not tensor.is_meta:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._copy = tensor.cpu()

    def wait(self) -> Tensor:
        """Returns the tensor on the host, after the device has done all work that came before the copy."""
        if self._event is not None:
            with activity.waiting(_OWN_DEVICE):
                self._event.synchronize()
            self._event = None
        return self._copy


def _live(group: Group, tensor: Tensor) -> ProcessGroup | PlannedGroup | None:
    """Returns the group to communicate a tensor over; None if it has one rank."""
    if group is None or group_size(group) == 1:
        return None
    planned = isinstance(group, PlannedGroup)
    assert tensor.is_meta or not planned, f"{group} is only planned and cannot communicate"
    return group


def _start(live: ProcessGroup | PlannedGroup, collective: Callable[..., object], *arguments: Any, **more: Any) -> Any:
    """Starts a collective of torch.distributed. A planned group does nothing."""
    if isinstance(live, PlannedGroup):
        return None
    return collective(*arguments, group=live, async_op=True, **more)


# ---------------------------------------------------------------------------------------------------------------------
# Reductions and copies


def all_reduce(tensor: Tensor, group: Group, op: ReduceOp.RedOpType = ReduceOp.SUM) -> Tensor:
    """Reduces a tensor in place over a group; returns it."""
    return start_all_reduce(tensor, group, op).wait()


def start_all_reduce(tensor: Tensor, group: Group, op: ReduceOp.RedOpType = ReduceOp.SUM) -> Pending:
    """Starts `all_reduce`."""
    live = _live(group, tensor)
    if live is None:
        return Pending(tensor, None)
    call = _record("all_reduce", tensor, live)
    return Pending(tensor, _start(live, dist.all_reduce, tensor, op=op), call=call)


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> Tensor:
    """Copies the tensor of the group's rank `source` to all ranks of the group, in place; returns the tensor."""
    live = _live(group, tensor)
    if live is not None and not isinstance(live, PlannedGroup):
        call = _record("broadcast", tensor, live)
        assert call is not None
        with activity.waiting(call):
            dist.broadcast(tensor, src=dist.get_global_rank(live, source), group=live)
    return tensor


def all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """Returns the tensors of all ranks of a group, which have one shape and type, in group order."""
    if _live(group, tensor) is None:
        return [tensor]
    return list(gather_rows(tensor.contiguous()[None], group))


def gather_rows(tensor: Tensor, group: Group) -> Tensor:
    """Gathers [n, ...] of each rank into [n * ranks, ...], in group order."""
    return start_gather_rows(tensor, group).wait()


def start_gather_rows(tensor: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """Starts `gather_rows`. Writes to `out` if it is given; `tensor` may be this rank's part of `out`."""
    live = _live(group, tensor)
    if live is None:
        if out is None:
            return Pending(tensor, None)
        return Pending(out.copy_(tensor) if out.data_ptr() != tensor.data_ptr() else out, None)
    tensor = tensor.contiguous()
    if out is None:
        out = tensor.new_empty(tensor.shape[0] * group_size(live), *tensor.shape[1:])
    call = _record("all_gather", out, live)
    return Pending(out, _start(live, _all_gather_single, out, tensor), tensor, call=call)


def reduce_scatter_rows(tensor: Tensor, group: Group) -> Tensor:
    """Sums [n * ranks, ...] over ranks and returns this rank's [n, ...] of the sum."""
    return start_reduce_scatter_rows(tensor, group).wait()


def start_reduce_scatter_rows(
    tensor: Tensor, group: Group, out: Tensor | None = None, op: ReduceOp.RedOpType = ReduceOp.SUM
) -> Pending:
    """Starts `reduce_scatter_rows`. Writes to `out` if it is given, which may be this rank's part of `tensor`."""
    live = _live(group, tensor)
    if live is None:
        return Pending(tensor if out is None or out.data_ptr() == tensor.data_ptr() else out.copy_(tensor), None)
    tensor = tensor.contiguous()
    if out is None:
        out = tensor.new_empty(tensor.shape[0] // group_size(live), *tensor.shape[1:])
    call = _record("reduce_scatter", tensor, live)
    return Pending(out, _start(live, _reduce_scatter_single, out, tensor, op=op), tensor, call=call)


def all_to_all_rows(
    tensor: Tensor, group: Group, output_sizes: Sequence[int] | None = None, input_sizes: Sequence[int] | None = None
) -> Tensor:
    """Sends part i of the rows to the group's rank i, and returns the received parts concatenated in group order.

    The parts have equal sizes, or the sizes (numbers of rows) that are given for received and sent parts.
    """
    return start_all_to_all_rows(tensor, group, output_sizes, input_sizes).wait()


def start_all_to_all_rows(
    tensor: Tensor, group: Group, output_sizes: Sequence[int] | None = None, input_sizes: Sequence[int] | None = None
) -> Pending:
    """Starts `all_to_all_rows`."""
    live = _live(group, tensor)
    if live is None:
        return Pending(tensor, None)
    tensor = tensor.contiguous()
    rows = tensor.shape[0] if output_sizes is None else sum(output_sizes)
    out = tensor.new_empty(rows, *tensor.shape[1:])
    kept = None if input_sizes is None else input_sizes[group_rank(live)]
    call = _record("all_to_all", tensor, live, kept_rows=kept)
    received = None if output_sizes is None else list(output_sizes)
    sent = None if input_sizes is None else list(input_sizes)
    work = _start(live, dist.all_to_all_single, out, tensor, received, sent)
    return Pending(out, work, tensor, call=call)


# ---------------------------------------------------------------------------------------------------------------------
# Between two ranks


def start_send(tensor: Tensor, peer: int, group: Group) -> Pending:
    """Starts to send a contiguous tensor to the global rank `peer`, a member of the group."""
    live = _live(group, tensor)
    assert live is not None and not isinstance(live, PlannedGroup) and tensor.is_contiguous()
    call = _record("send", tensor, live, (dist.get_rank(), peer))
    return Pending(tensor, dist.isend(tensor, dst=peer, group=live), tensor, call=call)


def start_receive(tensor: Tensor, peer: int, group: Group) -> Pending:
    """Starts to receive from the global rank `peer` into a contiguous tensor. Messages between two ranks arrive in the
    order of sending."""
    live = _live(group, tensor)
    assert live is not None and not isinstance(live, PlannedGroup) and tensor.is_contiguous()
    call = _record("receive", tensor, live, (peer, dist.get_rank()))
    return Pending(tensor, dist.irecv(tensor, src=peer, group=live), call=call)


def start_exchange(tensor: Tensor, to: int, out: Tensor, source: int, group: Group) -> Pending:
    """Starts to send `tensor` to the group's rank `to` and to receive `out` from its rank `source`. Both tensors are
    contiguous and have one type. All ranks of the group must call this; one without data passes empty tensors.
    """
    live = _live(group, tensor)
    assert live is not None and tensor.is_contiguous() and out.is_contiguous()
    ranks = group_ranks(live)
    if isinstance(live, PlannedGroup):
        return Pending(out, None)
    if tensor.numel():
        record_traffic("send", tensor, lambda: (dist.get_rank(), ranks[to]))
    if out.numel():
        record_traffic("receive", out, lambda: (ranks[source], dist.get_rank()))
    call = activity.begin("exchange", live.group_name, lambda: ranks)
    incoming, outgoing = out.view(-1), tensor.view(-1)
    if not tensor.is_cuda:  # gloo's all-to-all would send an empty message to each other rank
        sends = [dist.isend(outgoing, dst=ranks[to], group=live)] if tensor.numel() else []
        receives = [dist.irecv(incoming, src=ranks[source], group=live)] if out.numel() else []
        return Pending(
            out,
            _Messages([message for message in (*sends, *receives) if message is not None]),
            incoming,
            outgoing,
            call=call,
        )
    sent = [tensor.numel() if rank == to else 0 for rank in range(len(ranks))]
    received = [out.numel() if rank == source else 0 for rank in range(len(ranks))]
    # An all-to-all with otherwise empty parts: one launch, whereas a send and a receive could wait for each other.
    work = _start(live, dist.all_to_all_single, incoming, outgoing, received, sent)
    return Pending(out, work, incoming, outgoing, call=call)


# ---------------------------------------------------------------------------------------------------------------------
# Other functions


def averages_in_collective(tensor: Tensor, group: Group) -> bool:
    """Whether the group's backend can average this tensor."""
    return tensor.is_cuda and isinstance(group, ProcessGroup) and "nccl" in dist.get_backend_config(group)


def numbers_of_ranks(numbers: Sequence[float]) -> list[list[float]]:
    """Returns the numbers of every rank of torch.distributed, by rank. All ranks pass the same count of numbers.
    Without torch.distributed, returns this process's numbers. Waits for the device."""
    if not dist.is_initialized():
        return [list(numbers)]
    device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    here = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    return [found.tolist() for found in all_gather(here, dist.group.WORLD)]


def barrier(group: ProcessGroup | None = None) -> None:
    """Waits for all ranks of a group; None means the world."""
    if dist.is_available() and dist.is_initialized():
        everyone = dist.group.WORLD if group is None else group
        assert everyone is not None
        with activity.waiting(activity.begin("barrier", everyone.group_name, lambda: group_ranks(everyone))):
            if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group):
                dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
            else:
                dist.barrier(group=group)


def holds_on_all_ranks(value: bool, group: ProcessGroup, device: torch.device) -> bool:
    """Returns whether `value` is true on every rank of the group. The host waits for the other ranks."""
    return bool(all_reduce(torch.tensor(int(value), device=device), group, ReduceOp.MIN).item())


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """Returns a function of torch.distributed whose name depends on the release of torch."""
    function = getattr(dist, new, None)
    if function is not None:
        return function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(dist, old)


_all_gather_single = _renamed("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
