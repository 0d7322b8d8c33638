"""Exchanges of tokens for heads: when they begin and end, and that nothing of them stays behind."""

import gc
import weakref

import torch
from support.processes import run_on_ranks
from torch import Tensor

from megatron.core.communication import async_collective, collectives
from megatron.core.context_parallel.ulysses import from_pieces, in_pieces, share_keys, start_to_heads, start_to_rows


def test_pieces_come_together_again() -> None:
    tensor = torch.randn(5, 2, 12, 3)
    pieces = in_pieces(tensor, 3, 2)
    assert [piece.shape for piece in pieces] == [(5, 2, 6, 3)] * 2
    assert torch.equal(pieces[1][:, :, 2:4], tensor[:, :, 6:8])  # the second rank's second half
    assert torch.equal(from_pieces(pieces, 3), tensor)


def test_shared_keys() -> None:
    key = torch.arange(4.0)[None, None, :, None]
    assert share_keys(key, 8, 2) is key and share_keys(key, 8, 4) is key
    assert share_keys(key, 8, 8).flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert share_keys(key[:, :, :1], 8, 4).flatten().tolist() == [0, 0, 0, 0]
    assert share_keys(key[:, :, :2], 12, 3).flatten().tolist() == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]  # pairs of three, for ranks of four


def order_on_rank() -> tuple[list[str], bool]:
    """Two pieces, as attention uses them; what happened in which order."""
    log: list[str] = []
    start, group = collectives.start_all_to_all_rows, torch.distributed.group.WORLD

    class Logged:
        def __init__(self, rows: Tensor, over: collectives.Group, *sizes: None) -> None:
            log.append("start")
            self.pending = start(rows, over)
            self.tensor = self.pending.tensor

        def wait(self) -> Tensor:
            log.append("wait")
            return self.pending.wait()

    class Compute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            log.append("compute")
            return tensor * 2

        @staticmethod
        def backward(ctx, gradient):
            log.append("compute")
            return gradient * 2

    async_collective.start_all_to_all_rows = Logged  # type: ignore[assignment]
    tensor = torch.randn(4, 1, 8, 3, requires_grad=True)
    gc.disable()
    arriving = [start_to_heads([piece], group, 2) for piece in in_pieces(tensor, 2, 2)]
    kept = weakref.ref(arriving[0].rows)
    leaving = [start_to_rows(Compute.apply(piece.wait()[0]), group, 2) for piece in arriving]
    output = from_pieces([piece.wait() for piece in leaving], 2)
    assert torch.equal(output, tensor * 2)
    log.append("backward")
    output.sum().backward()
    assert torch.equal(tensor.grad, torch.full_like(tensor, 2.0))
    del arriving, leaving, output
    return log, kept() is None


def test_what_travels_while_something_is_computed() -> None:
    there = ["start", "start", "wait", "compute", "start", "wait", "compute", "start", "wait", "wait"]
    for log, freed in run_on_ranks(order_on_rank, 2):
        assert log == [*there, "backward", *there]
        assert freed
