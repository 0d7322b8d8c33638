"""Linear layers of a sequence parallel group whose products are cut into pieces, to hide their communication
(`--tp-comm-overlap`).

A piece consists of the tokens of one rank. A product that needs the tokens of all ranks starts with the rank's own
piece while the other pieces arrive. A product whose result is summed over ranks starts with the pieces of other ranks
and sends each piece while it computes the next. Both happen in forward and in backward:

| layer | forward | input gradient | weight gradient |
|---|---|---|---|
| column parallel | gathers x, piece by piece | sends its pieces | x is gathered behind the input gradient |
| row parallel | sends the pieces of y | gathers dy, piece by piece | uses the gathered dy |

Sums over ranks are computed in float32 at least, in the order of ranks, and rounded once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.backends import Backend
from megatron.core.communication.collectives import Group, gather_rows, group_size, reduce_scatter_rows
from megatron.core.communication.piece_exchange import PieceExchange, Transport, open_exchange, refuse_transport
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.ops.linear import SequenceShard, add_weight_gradient, defers_weight_grad, product
from megatron.core.utils.autograd_context import AutogradContext

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ProductsInPieces:
    """Which products the layers of a group cut into pieces."""

    group: Group
    transport: Transport | None
    cuts_gathers: bool
    """Products of gathered tokens are cut: forward of column, input gradient of row parallel layers."""
    cuts_sums: bool
    """Products of row parallel layers in forward, whose results are summed, are cut."""
    cuts_summed_gradients: bool
    """Input gradients of column parallel layers are cut. Otherwise they are sent when they are complete, behind the
    weight gradient."""
    sum_rows: Callable[[Tensor], Tensor]
    """Computes a bias's gradient: [t, out] -> [out]."""

    def column_parallel_linear(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, group: Group = None, *, gathers: bool = True
    ) -> Tensor:
        """Returns `ops.linear.linear` of the same arguments, with `gathers`: [t / ranks, ..., in] -> [t, ..., out]."""
        assert gathers and group is self.group
        return _ColumnParallelLinear.apply(inputs, weight, bias, self)

    def row_parallel_linear(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Returns this rank's tokens of the sum of inputs @ weight^T over ranks: [t, ..., in] -> [t / ranks, ...,
        out]."""
        if inputs.shape[0] % group_size(self.group):
            raise UserError(
                f"--tp-comm-overlap: {inputs.shape[0]} rows do not divide into a piece for each of "
                f"{group_size(self.group)} tensor parallel ranks"
            )
        return _RowParallelLinear.apply(inputs, weight, self)

    def start_gather(self, own: Tensor, keeps_own: bool) -> PieceExchange:
        """Sends this rank's rows to all others. With `keeps_own` the exchange's slots will also contain this rank's
        rows."""
        exchange = open_exchange(self.group, own.shape, own, self.transport)
        for distance in range(1, exchange.ranks):
            exchange.send(own, distance)
        if keeps_own:
            exchange.keep(own)
        return exchange

    def multiply_gathered(self, exchange: PieceExchange, own: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of all rows: [n, k] of each rank and [k, out] -> [n * ranks, out]."""
        output = own.new_empty(exchange.ranks, own.shape[0], right.shape[1])
        product(own, right, bias, out=output[exchange.rank])
        for distance in range(1, exchange.ranks):
            source = (exchange.rank - distance) % exchange.ranks
            product(exchange.receive(distance), right, bias, out=output[source])
        return output.flatten(0, 1)

    def start_sum(self, left: Tensor, right: Tensor, cuts: bool) -> "PendingTotal":
        """Starts to sum left @ right over ranks: [n * ranks, k] and [k, out] -> [n, out] of the sum. With `cuts` each
        piece of the product is sent as soon as it is computed."""
        ranks = group_size(self.group)
        parts = left.unflatten(0, (ranks, -1))
        exchange = open_exchange(self.group, (parts.shape[1], right.shape[1]), left, self.transport)
        if not cuts:
            whole = product(left, right).unflatten(0, (ranks, -1))
        for distance in range(1, ranks):
            to = (exchange.rank + distance) % ranks
            exchange.send(product(parts[to], right) if cuts else whole[to], distance)
        own = product(parts[exchange.rank], right) if cuts else whole[exchange.rank]
        return PendingTotal(exchange, own)


class PendingTotal:
    """A sum over ranks whose parts are still being exchanged."""

    def __init__(self, exchange: PieceExchange, own: Tensor) -> None:
        self._exchange, self._own = exchange, own

    def wait(self) -> Tensor:
        """Returns the sum for this rank's tokens."""
        exchange = self._exchange
        if exchange.ranks == 2:
            total = self._own + exchange.receive(1)
        else:
            exchange.slots[exchange.rank].copy_(self._own)
            total = exchange.receive_all().sum(0)  # torch sums half precision in float32
        exchange.close()
        return total


def cuts_products(config: "TransformerConfig") -> bool:
    """Returns whether the config asks for products in pieces and has several sequence parallel ranks."""
    return bool(config.tp_comm_overlap and config.sequence_parallel and config.tensor_model_parallel_size > 1)


def products_in_pieces(config: ModelParallelConfig, group: Group, backend: Backend) -> ProductsInPieces | None:
    """Returns how a sequence parallel layer cuts its products; None if it does not cut them. Products in fp8 are not
    cut, because their scale depends on the largest value of all rows, which is known only when the last piece has
    arrived."""
    if not config.tp_comm_overlap or backend.fp8 is not None:
        return None
    refuse_transport(config.tp_comm_overlap_transport)
    return ProductsInPieces(
        group,
        config.tp_comm_overlap_transport,
        cuts_gathers=config.tp_comm_overlap_ag,
        cuts_sums=config.tp_comm_overlap_rs,
        cuts_summed_gradients=config.tp_comm_overlap_rs_dgrad,
        sum_rows=backend.matrices.sum_rows,
    )


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, inputs: Tensor, weight: Tensor, bias: Tensor | None, pieces: ProductsInPieces
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # Keeps the parameter, not a saved tensor: see ops/linear.py.
        ctx.weight, ctx.pieces = weight, pieces
        own = inputs.reshape(-1, weight.shape[1]).contiguous()  # [t / ranks, in]
        if pieces.cuts_gathers:
            exchange = pieces.start_gather(own, keeps_own=False)
            output = pieces.multiply_gathered(exchange, own, weight.t(), bias)
            exchange.close()
        else:
            output = product(gather_rows(own, pieces.group), weight.t(), bias)
        return output.view(-1, *inputs.shape[1:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), weight, pieces = ctx.saved_tensors, ctx.weight, ctx.pieces
        needs_inputs, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = output_gradient.reshape(-1, weight.shape[0])  # [t, out]
        own = inputs.detach().reshape(-1, weight.shape[1]).contiguous()  # [t / ranks, in]
        defers = defers_weight_grad(weight)
        gathered = pieces.start_gather(own, keeps_own=True) if needs_weight and not defers else None
        total = pieces.start_sum(rows, weight.detach(), pieces.cuts_summed_gradients) if needs_inputs else None
        weight_gradient = bias_gradient = None
        if gathered is not None:
            weight_gradient = add_weight_gradient(weight, rows, gathered.receive_all().flatten(0, 1))
            gathered.close()
        elif needs_weight:
            weight_gradient = add_weight_gradient(weight, rows, SequenceShard(own, pieces.group))
        if needs_bias:
            bias_gradient = pieces.sum_rows(rows)
        inputs_gradient = None if total is None else total.wait().view(inputs.shape)
        return inputs_gradient, weight_gradient, bias_gradient, None


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, inputs: Tensor, weight: Tensor, pieces: ProductsInPieces) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.pieces = weight, pieces
        rows = inputs.reshape(-1, weight.shape[1])  # [t, in]
        if pieces.cuts_sums:
            output = pieces.start_sum(rows, weight.t(), cuts=True).wait()
        else:
            output = reduce_scatter_rows(product(rows, weight.t()), pieces.group)
        return output.view(-1, *inputs.shape[1:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), weight, pieces = ctx.saved_tensors, ctx.weight, ctx.pieces
        needs_inputs, needs_weight, *_ = ctx.needs_input_grad
        own = output_gradient.reshape(-1, weight.shape[0]).contiguous()  # [t / ranks, out]
        columns = inputs.detach().reshape(-1, weight.shape[1])  # [t, in]
        gathered = inputs_gradient = weight_gradient = None
        if pieces.cuts_gathers:
            gathered = pieces.start_gather(own, keeps_own=needs_weight)
            if needs_inputs:
                inputs_gradient = pieces.multiply_gathered(gathered, own, weight.detach(), None)
            rows = gathered.receive_all().flatten(0, 1)  # [t, out]
        else:
            rows = gather_rows(own, pieces.group)
            inputs_gradient = product(rows, weight.detach()) if needs_inputs else None
        if needs_weight:
            # A deferred product is computed later, when the slots already contain other rows.
            kept = rows.clone() if gathered is not None and defers_weight_grad(weight) else rows
            weight_gradient = add_weight_gradient(weight, kept, columns)
        if gathered is not None:
            gathered.close()
        return None if inputs_gradient is None else inputs_gradient.view(inputs.shape), weight_gradient, None
