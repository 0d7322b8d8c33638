"""Attention of rows that are split over context parallel ranks, with the communication of `cp_comm_type`."""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.attention_plan import AttentionPlan, BlockPlan
from megatron.core.communication.collectives import Group, group_size
from megatron.core.context_parallel.all_gather import gather_whole_rows
from megatron.core.context_parallel.comm_types import CommType
from megatron.core.context_parallel.kv_exchange import Ring
from megatron.core.context_parallel.ring import RingCall, ring_attention
from megatron.core.context_parallel.splitting import chunk_length, cut_rows
from megatron.core.context_parallel.ulysses import (
    from_pieces,
    in_pieces,
    share_keys,
    start_to_heads,
    start_to_rows,
    whole_rows_of,
)
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.attention.blocks import BlockCall
from megatron.core.ops.attention.kernels import Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.tokens import SequencePart, Tokens, row_index


@dataclass(frozen=True)
class SplitRows:
    """The rows in one stage of the computation, with the data of each row."""

    part: SequencePart
    """The part of each row that this rank holds; with size 1 the whole row."""
    length: int
    """Number of tokens of a whole row."""
    starts: Tensor | None
    """With dropout: global index of the first token of each row, int64 [b]."""
    mask: Tensor | None
    """bool [b or 1, heads or 1, tokens held here or 1, length or 1]; True hides the key."""

    def positions(self, device: torch.device) -> Tensor:
        """Returns the position in its row of each token that this rank holds, int64 [s]."""
        return row_index(Tokens(self.length // self.part.size, 1, self.part), device)


class ContextAttention:
    """Attention of a layer whose rows are split in zig-zag over the ranks of `groups.cp`, or for one micro-batch over
    other ranks (`over`).

    It has two stages, and `cp_comm_type` decides which of them communicate. In the first, `a2a_size` ranks exchange
    tokens for heads, so each gets a longer part of the rows and fewer heads. In the second, queries attend to the keys
    of the other ranks.
    """

    def __init__(
        self,
        comm_type: CommType,
        groups: ProcessGroupCollection,
        variant: AttentionVariant,
        heads: int,
        plan: AttentionPlan,
        blocks: BlockPlan,
        merge: Callable[..., None],
    ) -> None:
        self.comm_type, self.groups, self.variant = comm_type, groups, variant
        self.plan, self.blocks, self.merge = plan, blocks, merge
        self.part = SequencePart(groups.rank("cp"), groups.size("cp"))
        self.a2a_size = _a2a_size(comm_type, groups)
        if heads % self.a2a_size:
            raise UserError(
                f"cp_comm_type {comm_type.value} shares the {heads} heads of a tensor parallel rank among "
                f"{self.a2a_size} context parallel ranks, which do not divide them; use p2p"
            )

    def over(self, part: SequencePart) -> "ContextAttention":
        """Returns this attention for rows that the ranks of `part.group` share. Not for a2a."""
        assert self.a2a_size == 1 and part.group is not None
        other = copy.copy(self)
        other.part = part
        return other

    @property
    def _group(self) -> Group:
        return self.groups.cp if self.part.group is None else self.part.group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, situation: Situation) -> Tensor:
        """Computes attention: query [s, b, a, d], key [s, b, g, d] and value [s, b, g, dv] of this rank -> [s, b, a,
        dv].

        `call.dropout` describes this rank's tokens. `call.mask` has the queries of whole rows or of this rank only.
        With a mask, the keys of all ranks are gathered, and `cp_comm_type` has no effect. Raises UserError for a key
        cache and for masks of another shape.
        """
        if call.query_positions is not None or len(query) != len(key):
            raise UserError(f"decoding with a cache: not yet with context_parallel_size {self.part.size}; use 1")
        rows = self._rows(query, call)
        if self.a2a_size == 1:
            return self._with_kv_exchange(query, key, value, rows, call, situation)
        return self._with_a2a(query, key, value, rows, call, situation)

    def whole_keys(self, query: Tensor, key: Tensor, call: AttentionCall) -> tuple[Tensor, AttentionCall]:
        """Returns the keys of whole rows, gathered from all ranks without a gradient, and the call with the positions
        of this rank's queries among them, without dropout."""
        rows = self._rows(query, call)
        positions = rows.positions(query.device).expand(query.shape[1], -1)  # [b, s]
        keys = gather_whole_rows(key.detach(), self._group, self.part.size)
        return keys, dataclasses.replace(call, query_positions=positions, mask=rows.mask, dropout=None)

    @property
    def plan_in_use(self) -> AttentionPlan | BlockPlan:
        """The kernels that compute attention where there is no attention mask."""
        return self.plan if self.a2a_size == self.part.size else self.blocks

    def describe(self, device_type: str, packed: bool) -> str:
        """Describes how ranks exchange keys, and which kernels compute attention."""
        gathers = "" if self.plan_in_use is self.plan else " (all keys gathered where there is an attention mask)"
        kernels = self.plan_in_use.describe(device_type, packed)
        return f"{self.comm_type.value} over {self.part.size} ranks{gathers}, {kernels}"

    # Rows and masks of this rank
    # -----------------------------------------------------------------------------------------------

    def _rows(self, query: Tensor, call: AttentionCall) -> SplitRows:
        s, b = query.shape[:2]
        length = s * self.part.size
        chunk = chunk_length(length, self.part.size)
        starts = None
        if call.dropout is not None:
            starts = call.dropout.tokens.index.view(s, b)[0] - self.part.rank * chunk
        return SplitRows(self.part, length, starts, self._mask_of_part(call.mask, s, length))

    def _mask_of_part(self, mask: Tensor | None, held: int, length: int) -> Tensor | None:
        if mask is None:
            return None
        mask = mask[(None,) * (4 - mask.dim())]
        queries, keys = mask.shape[2:]
        if queries not in (1, held, length) or keys not in (1, length):
            raise UserError(
                f"attention_mask for {queries} queries and {keys} keys: with context_parallel_size {self.part.size} it "
                f"has the {length} keys of whole rows, and their queries or the {held} of this rank"
            )
        return cut_rows(mask, self.part, 2) if queries == length else mask

    # First stage: tokens for heads
    # -------------------------------------------------------------------------------------------

    def _a2a_group(self) -> Group:
        return self.groups.cp if self.comm_type is CommType.a2a else self.groups.hcp[0]

    def _rows_after_a2a(self, rows: SplitRows, group: Group) -> SplitRows:
        """Returns the rows after the first stage: their parts are `a2a_size` times as long."""
        count, mask = self.a2a_size, rows.mask
        if mask is not None and mask.shape[2] > 1:
            mask = whole_rows_of(mask, group, count)
        if mask is not None and mask.shape[1] > 1:
            heads = mask.shape[1] // count
            mask = mask.narrow(1, rows.part.rank % count * heads, heads)
        part = SequencePart(rows.part.rank // count, rows.part.size // count)
        return dataclasses.replace(rows, part=part, mask=mask)

    def _with_a2a(
        self, query: Tensor, key: Tensor, value: Tensor, rows: SplitRows, call: AttentionCall, situation: Situation
    ) -> Tensor:
        """Splits the heads into two pieces if possible, so one piece is sent while the other is computed."""
        group, count = self._a2a_group(), self.a2a_size
        rows = self._rows_after_a2a(rows, group)
        key, value = (share_keys(tensor, query.shape[2], count) for tensor in (key, value))
        pieces = 2 if key.shape[2] // count % 2 == 0 and (rows.mask is None or rows.mask.shape[1] == 1) else 1
        tensors = [in_pieces(tensor, count, pieces) for tensor in (query, key, value)]
        pending = [start_to_heads(piece, group, count) for piece in zip(*tensors, strict=True)]
        heads = query.shape[2] // count // pieces
        first = self.part.rank % count * pieces * heads
        leaving = []
        for number, piece in enumerate(pending):
            its_call = _call_of_heads(call, first + number * heads, heads)
            query, key, value = piece.wait()
            context = self._with_kv_exchange(query, key, value, rows, its_call, situation)
            leaving.append(start_to_rows(context, group, count))
        return from_pieces([piece.wait() for piece in leaving], count)

    # Second stage: keys of other ranks
    # ---------------------------------------------------------------------------------------------

    def _with_kv_exchange(
        self, query: Tensor, key: Tensor, value: Tensor, rows: SplitRows, call: AttentionCall, situation: Situation
    ) -> Tensor:
        if rows.part.size == 1 or rows.mask is not None:
            return self._with_all_keys(query, key, value, rows, call, situation)
        join = call.cu_seqlens is None and call.dropout is None
        exchange = Ring(rows.part, self._kv_group(), len(query) // 2, self.variant.reach, join)
        kernel = self.blocks.choices[situation].kernel
        positions = BlockCall(call.cu_seqlens, call.max_seqlen, call.dropout, rows.starts, call.first_head)
        return ring_attention(
            query, key, value, call.sink, RingCall(exchange, kernel, self.merge, self.variant, positions)
        )

    def _kv_group(self) -> Group:
        return self.groups.hcp[1] if self.comm_type is CommType.a2a_p2p else self._group

    def _with_all_keys(
        self, query: Tensor, key: Tensor, value: Tensor, rows: SplitRows, call: AttentionCall, situation: Situation
    ) -> Tensor:
        """Gathers all keys and uses the kernels of whole rows, which support masks."""
        of_tokens = rows.positions(query.device)
        dropout, positions = call.dropout, None
        if dropout is not None:
            assert rows.starts is not None
            index = (rows.starts + of_tokens[:, None]).view(-1)  # [t]
            dropout = dataclasses.replace(dropout, tokens=dataclasses.replace(dropout.tokens, index=index))
        if rows.part.size > 1:
            key, value = (gather_whole_rows(tensor, self._kv_group(), rows.part.size) for tensor in (key, value))
            positions = of_tokens.expand(query.shape[1], -1)  # [b, s]
        call = dataclasses.replace(call, query_positions=positions, mask=rows.mask, dropout=dropout)
        compute = self.plan.kernel_of(situation, call, query.shape[0]).compute
        return compute(query, key, value, self.variant, call)


def _call_of_heads(call: AttentionCall, first: int, heads: int) -> AttentionCall:
    sink = None if call.sink is None else call.sink.narrow(0, first, heads)
    return dataclasses.replace(call, sink=sink, first_head=call.first_head + first)


def _a2a_size(comm_type: CommType, groups: ProcessGroupCollection) -> int:
    """Returns how many ranks exchange tokens for heads; 1 if none do."""
    if comm_type is CommType.a2a:
        return groups.size("cp")
    if comm_type is not CommType.a2a_p2p:
        return 1
    filled_by_hand = groups.grid is None
    levels = [group_size(g) for g in groups.hcp] if filled_by_hand else [len(r) for r in groups.hierarchical_ranks()]
    if len(levels) != 2:
        raise UserError(
            f"cp_comm_type a2a+p2p needs two hierarchical_context_parallel_sizes, of a2a and of p2p; there are {levels}"
        )
    return levels[0]
