"""Muon (Jordan et al. 2024): the update of a weight matrix is the orthogonal matrix nearest to its momentum.

The momentum is sharded like any state of the optimizer. For the orthogonalisation each matrix is sent to one of the
data parallel ranks that hold its shards, its owner, and the update is sent back. So shards may cut matrices anywhere.
If tensor parallel ranks divide a matrix, --muon-tp-mode chooses between orthogonalising the part on each rank
(blockwise), the whole matrix on each rank (duplicated), or the whole matrix on one of the ranks (distributed).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.communication.collectives import all_to_all_rows, gather_rows, group_rank, group_size
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.units import ParameterSlot
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer.gram_newton_schulz import Directions, newton_schulz_in_float16
from megatron.core.optimizer.muon_matrices import Matrices, Runs, matrices_of, takes_muon
from megatron.core.optimizer.newton_schulz import newton_schulz, update_scale
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.segments import StepInputs, replace

_ELEMENTS_AT_ONCE = 1 << 29
"""Largest number of elements of neighbouring units that are orthogonalised together. It limits temporary memory."""

_TENSOR_GROUP = {"dense": "tp", "expert": "expt_tp"}


@dataclass(frozen=True)
class MuonSegment:
    """The neighbouring slots of a unit that Muon updates with one learning rate, in this rank's shard."""

    unit: Unit
    start: int
    """First element in the whole unit."""
    stop: int
    shard_start: int
    """Index in the whole unit of the first element on this rank; the tensors below begin with it."""
    weights: Tensor
    momentum: Tensor
    gradients: Tensor
    model_weights: Tensor | None

    @property
    def slots(self) -> list[ParameterSlot]:
        """The slots, including those in the shards of other ranks."""
        return [slot for slot in self.unit.slots if self.start <= slot.start < self.stop]


@dataclass(frozen=True)
class _Item:
    """A parameter of a round."""

    segment: int
    slot: ParameterSlot
    owner: int
    pieces: tuple[tuple[int, int], ...]
    """For each rank of the shard group: elements [start, stop) of the box that it has."""


class Muon:
    """Updates the segments of one parameter group, which belong to one grid.

    m = momentum m + (1 - momentum) g;  u = m, or with Nesterov momentum m + (1 - momentum) g;
    w = w (1 - lr weight_decay) - lr scale NewtonSchulz(u), for g = gradient / divisor.
    """

    def __init__(
        self, segments: Sequence[MuonSegment], config: OptimizerConfig, groups: ProcessGroupCollection
    ) -> None:
        self.config = config
        self.segments = list(segments)
        sharding, grid = segments[0].unit.sharding, segments[0].unit.plan.grid
        self.shard_group = getattr(groups, sharding.shard_group) if sharding.shards > 1 else None
        self.shards, self.index = sharding.shards, sharding.shard_index
        self.tensor_group = getattr(groups, _TENSOR_GROUP[grid])
        self.rounds = [self._plan(members) for members in _rounds(self.segments)]
        for slot in (slot for segment in segments for slot in segment.slots):
            assert takes_muon(slot.parameter, slot.info, config), slot.info.name
            list(
                matrices_of(slot.info, group_size(self.tensor_group), config)
            )  # raises UserError for a box that is no whole matrix

    def _plan(self, members: Sequence[int]) -> list[_Item]:
        """Returns the parameters of some segments with their owners. The largest parameters are assigned first, each to
        the rank with the least work."""
        found = [(number, slot) for number in members for slot in self.segments[number].slots]
        load = [0] * self.shards
        items = []
        for number, slot in sorted(found, key=lambda item: -item[1].info.box.numel):
            owner = load.index(min(load))
            load[owner] += slot.info.box.numel
            size = self.segments[number].unit.plan.numel // self.shards
            pieces = [
                (
                    min(max(rank * size, slot.start), slot.box_stop) - slot.start,
                    min(max((rank + 1) * size, slot.start), slot.box_stop) - slot.start,
                )
                for rank in range(self.shards)
            ]
            items.append(_Item(number, slot, owner, tuple(pieces)))
        return items

    def update(self, step: StepInputs, lr: Tensor, weight_decay: float | Tensor) -> None:
        """Updates weights and momentum in place and rounds the weights into the model's, unless `step.skip` is set.
        Collective."""
        for items in self.rounds:
            if self._in_place:
                self._update_in_place(items, step, lr, weight_decay)
                continue
            numbers = sorted({item.segment for item in items})
            boxes = self._gather(
                items, {each: self._directions(self.segments[each], step, weight_decay) for each in numbers}
            )
            updates = self._orthogonalize([item for item in items if item.owner == self.index], boxes)
            for item, update in self._scatter(items, updates):
                self._apply(item, update, step, lr, weight_decay)

    def _directions(self, segment: MuonSegment, step: StepInputs, weight_decay: float | Tensor) -> Tensor:
        """Updates the momentum and returns the tensor to orthogonalise."""
        main, beta = segment.weights.dtype, self.config.muon_momentum
        if _has_kernels(segment):
            return self._update_momentum(segment.momentum, segment.gradients, segment.weights, step, weight_decay)[0]
        gradient = segment.gradients.to(main) / step.divisor.to(main)
        if not self.config.decoupled_weight_decay:
            gradient = gradient + weight_decay * segment.weights
        momentum = segment.momentum + (1.0 - beta) * (gradient - segment.momentum)
        direction = momentum + (1.0 - beta) * (gradient - momentum) if self.config.muon_use_nesterov else momentum
        replace(step.skip, (segment.momentum, momentum))
        return direction

    def _apply(
        self,
        item: _Item,
        update: Tensor,
        step: StepInputs,
        lr: Tensor,
        weight_decay: float | Tensor,
        runs: Runs | None = None,
    ) -> None:
        """Updates this rank's part of a parameter's weights, or some of its runs."""
        segment, decoupled = self.segments[item.segment], self.config.decoupled_weight_decay
        weights, main = self._piece(item, segment.weights), segment.weights.dtype
        rounded = None if segment.model_weights is None else self._piece(item, segment.model_weights)
        if _has_kernels(segment):
            from megatron.core.optimizer.muon_triton import update_weights_triton

            update_weights_triton(weights, rounded, update, step, lr, weight_decay, decoupled, runs)
            return
        kept = weights * (1.0 - lr * weight_decay).to(main) if decoupled else weights
        replace(step.skip, (weights, kept - lr.to(main) * update))
        if rounded is not None:
            rounded.copy_(weights)

    # On a GPU that has whole matrices --------------------------------------------------------------------------------

    @property
    def _in_place(self) -> bool:
        """Whether kernels read and write all matrices where they are, because this rank has them whole."""
        alone = self.shards == 1 and group_size(self.tensor_group) == 1
        return alone and self._in_float16 and all(_has_kernels(segment) for segment in self.segments)

    def _update_in_place(
        self, items: Sequence[_Item], step: StepInputs, lr: Tensor, weight_decay: float | Tensor
    ) -> None:
        """Updates parameters that are not sharded. Only the matrices of one call of Newton-Schulz are copied at a
        time."""
        for batches in self._batches(items):
            parts = [[self._read_in_place(*member, step, weight_decay) for member in batch] for batch in batches]
            done = self._newton_schulz(parts, self._scales([batch[0][1] for batch in batches]))
            for batch, values in zip(batches, done, strict=True):
                updates = values.split([matrices.shape[0] for _, matrices in batch])
                for (item, matrices), update in zip(batch, updates, strict=True):
                    self._apply(item, update, step, lr, weight_decay, matrices.runs(item.slot.info))

    def _read_in_place(
        self, item: _Item, matrices: Matrices, step: StepInputs, weight_decay: float | Tensor
    ) -> Directions:
        """Updates the momentum of matrices and returns the matrices to orthogonalise."""
        segment = self.segments[item.segment]
        momentum, gradients, weights = (
            self._piece(item, tensor) for tensor in (segment.momentum, segment.gradients, segment.weights)
        )
        values, squares = self._update_momentum(
            momentum, gradients, weights, step, weight_decay, matrices.runs(item.slot.info)
        )
        return Directions(values.view(matrices.shape), squares)

    def _update_momentum(
        self,
        momentum: Tensor,
        gradients: Tensor,
        weights: Tensor,
        step: StepInputs,
        weight_decay: float | Tensor,
        runs: Runs | None = None,
    ) -> tuple[Tensor, Tensor]:
        from megatron.core.optimizer.muon_triton import update_momentum_triton

        return update_momentum_triton(
            momentum,
            gradients,
            weights,
            step,
            weight_decay,
            beta=self.config.muon_momentum,
            nesterov=self.config.muon_use_nesterov,
            decoupled=self.config.decoupled_weight_decay,
            runs=runs,
        )

    # Between the ranks that shard the state --------------------------------------------------------------------------

    def _piece(self, item: _Item, flat: Tensor) -> Tensor:
        """Returns this rank's part of a parameter in a tensor of its segment."""
        first = item.slot.start - self.segments[item.segment].shard_start
        begin, end = item.pieces[self.index]
        return flat[first + begin : first + end]

    def _gather(self, items: Sequence[_Item], directions: dict[int, Tensor]) -> dict[int, Tensor]:
        """Returns the boxes, one-dimensional, of the parameters that this rank owns, by the position of their slot."""
        mine = [item for item in items if item.owner == self.index]
        if self.shards == 1:
            return {id(item): self._piece(item, directions[item.segment]) for item in mine}
        sent = [[self._piece(item, directions[item.segment]) for item in _owned(items, rank)] for rank in self._ranks]
        sizes = [[_length(item, rank) for item in mine] for rank in self._ranks]
        received = self._exchange(sent, sizes, self.segments[0].weights.dtype)
        return {id(item): torch.cat([received[rank][place] for rank in self._ranks]) for place, item in enumerate(mine)}

    def _scatter(self, items: Sequence[_Item], updates: dict[int, Tensor]) -> Iterator[tuple[_Item, Tensor]]:
        """Yields all parameters with this rank's parts of the updates that their owners have computed."""
        if self.shards == 1:
            yield from ((item, updates[id(item)]) for item in items)
            return
        mine = [item for item in items if item.owner == self.index]
        sent = [[updates[id(item)][slice(*item.pieces[rank])] for item in mine] for rank in self._ranks]
        sizes = [[_length(item, self.index) for item in _owned(items, rank)] for rank in self._ranks]
        received = self._exchange(sent, sizes, torch.float16 if self._in_float16 else self.segments[0].weights.dtype)
        for rank in self._ranks:
            yield from zip(_owned(items, rank), received[rank], strict=True)

    @property
    def _ranks(self) -> range:
        return range(self.shards)

    def _exchange(
        self, sent: list[list[Tensor]], sizes: list[list[int]], dtype: torch.dtype
    ) -> list[tuple[Tensor, ...]]:
        """Sends lists of tensors to each rank; returns those from each rank, which have these sizes."""
        nothing = self.segments[0].weights.new_empty(0, dtype=dtype)
        joined = torch.cat([nothing, *(tensor for tensors in sent for tensor in tensors)])
        received = all_to_all_rows(
            joined, self.shard_group, [sum(s) for s in sizes], [sum(t.numel() for t in tensors) for tensors in sent]
        )
        parts = received.split([sum(s) for s in sizes])
        return [part.split(lengths) if lengths else () for part, lengths in zip(parts, sizes, strict=True)]

    # Orthogonalisation -----------------------------------------------------------------------------------------------

    @property
    def _in_float16(self) -> bool:
        """Whether matrices are orthogonalised in float16."""
        weights = self.segments[0].weights
        return weights.is_cuda and weights.dtype is torch.float32 and self.config.muon_fp32_matmul_prec != "high"

    def _orthogonalize(self, items: Sequence[_Item], boxes: dict[int, Tensor]) -> dict[int, Tensor]:
        """Returns the updates of parameters, one-dimensional, from the directions in their boxes."""
        updates: dict[int, Tensor] = {}
        for batches in self._batches(items):
            parts = [[matrices.read(boxes[id(item)], item.slot.info) for item, matrices in batch] for batch in batches]
            firsts = [batch[0][1] for batch in batches]
            for batch, read, done in zip(batches, parts, self._in_group(parts, firsts), strict=True):
                for (item, matrices), values in zip(batch, done.split([len(part) for part in read]), strict=True):
                    if matrices.heads is None:
                        updates[id(item)] = values.reshape(-1)
                        continue
                    box = updates.setdefault(id(item), values.new_empty(item.slot.info.box.numel))
                    matrices.write(box, item.slot.info, values)
        return updates

    def _batches(self, items: Sequence[_Item]) -> Iterable[list[list[tuple[_Item, Matrices]]]]:
        """Returns the matrices of parameters in batches of one shape. Batches that can be orthogonalised together are
        in one list: in float16 those whose matrices have equal shorter sides, if no tensor parallel ranks divide them.
        """
        ranks = group_size(self.tensor_group)
        batches: dict[tuple[object, ...], list[tuple[_Item, Matrices]]] = {}
        for item in items:
            for matrices in matrices_of(item.slot.info, ranks, self.config):
                shape = (*matrices.shape[1:], matrices.whole, matrices.split)
                batches.setdefault(shape, []).append((item, matrices))
        together: dict[object, list[list[tuple[_Item, Matrices]]]] = {}
        for members in batches.values():
            kind = members[0][1]
            joins = self._in_float16 and kind.split is None
            together.setdefault(min(kind.shape[1:]) if joins else (kind.shape[1:], kind.whole, kind.split), []).append(
                members
            )
        return together.values()

    def _in_group(self, parts: Sequence[Sequence[Tensor]], kinds: Sequence[Matrices]) -> list[Tensor]:
        """Returns the updates of batches of matrices [n, rows, columns], of which the tensor parallel ranks may each
        have a part. Batches that are divided come alone."""
        mode, group, split = self.config.muon_tp_mode, self.tensor_group, kinds[0].split
        scales = self._scales(kinds)
        if split is None or mode == "blockwise" or group_size(group) == 1:
            return self._newton_schulz([[Directions(part) for part in batch] for batch in parts], scales)

        def orthogonal(whole: Tensor) -> Tensor:
            return self._newton_schulz([[Directions(whole)]], scales)[0]

        (only,) = parts
        matrices = torch.cat(list(only))
        if mode == "duplicated":
            ranks = group_size(group)
            whole = torch.cat(gather_rows(matrices, group).chunk(ranks), split)
            return [orthogonal(whole).chunk(ranks, split)[group_rank(group)]]
        return [_distributed(matrices, split, group, orthogonal)]

    def _scales(self, kinds: Sequence[Matrices]) -> list[float]:
        """Returns the factors of the updates of matrices."""
        factor, mode = self.config.muon_extra_scale_factor, self.config.muon_scale_mode
        return [factor * update_scale(*kind.whole, mode) for kind in kinds]

    def _newton_schulz(self, batches: Sequence[Sequence[Directions]], scales: Sequence[float]) -> list[Tensor]:
        """Returns the orthogonal matrices of each batch times its scale."""
        steps, coefficients = self.config.muon_num_ns_steps, self.config.muon_coefficient_type
        pairs = list(zip(batches, scales, strict=True))
        if self._in_float16:
            return newton_schulz_in_float16(pairs, steps, coefficients)
        precision = self.config.muon_fp32_matmul_prec
        joined = ((torch.cat([part.values for part in parts]), scale) for parts, scale in pairs)
        return [scale * newton_schulz(matrices, steps, coefficients, precision) for matrices, scale in joined]


def _distributed(matrices: Tensor, split: int, group: object, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies `function` to whole matrices, some on each rank: ranks exchange the parts before and the parts of the
    results after."""
    ranks, count = group_size(group), len(matrices)  # type: ignore[arg-type]
    each = -(-count // ranks)
    padded = torch.cat([matrices, matrices.new_zeros(each * ranks - count, *matrices.shape[1:])])
    parts = all_to_all_rows(padded, group).chunk(ranks)  # type: ignore[arg-type]
    done = function(torch.cat(parts, split)).chunk(ranks, split)
    return all_to_all_rows(torch.cat(done), group)[:count]  # type: ignore[arg-type]


def _has_kernels(segment: MuonSegment) -> bool:
    """Whether a segment is updated by kernels for GPUs."""
    tensors = segment.weights, segment.momentum, segment.gradients
    return all(tensor.is_cuda and tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in tensors)


def _owned(items: Iterable[_Item], rank: int) -> list[_Item]:
    return [item for item in items if item.owner == rank]


def _length(item: _Item, rank: int) -> int:
    begin, end = item.pieces[rank]
    return end - begin


def _rounds(segments: Sequence[MuonSegment]) -> list[list[int]]:
    """Returns the numbers of neighbouring segments in rounds of limited size, equal on all ranks."""
    rounds: list[list[int]] = []
    filled = 0
    for number, segment in enumerate(segments):
        size = segment.stop - segment.start
        if not rounds or filled + size > _ELEMENTS_AT_ONCE:
            rounds.append([])
            filled = 0
        rounds[-1].append(number)
        filled += size
    return rounds
