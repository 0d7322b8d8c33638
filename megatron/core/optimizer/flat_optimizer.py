"""FlatOptimizer: applies an update rule to the flat shards of units. All decisions are made on the device."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.chunk import AVERAGE, MASTER, Chunk, optimizer_state_chunk
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.sharding_strategy import replica_ranks
from megatron.core.distributed.units import ParameterSlot
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer.clip_grads import clip_divisor, count_zeros, counted_gradients, grad_norm
from megatron.core.optimizer.grad_scaler import GradScaler, build_grad_scaler
from megatron.core.optimizer.host_state import HostPiece, StateStream, choose_offloaded
from megatron.core.optimizer.muon import Muon, MuonSegment
from megatron.core.optimizer.muon_matrices import MOMENTUM
from megatron.core.optimizer.nvme_state import FileStream, kept_as
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepUpdate, true_on_all_ranks
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import (
    GroupSettings,
    ParameterRange,
    ParamGroupOverride,
    ParamKey,
    parameter_ranges,
)
from megatron.core.optimizer.qk_clip import QKClip
from megatron.core.optimizer.segments import StateSegment, StepInputs
from megatron.core.optimizer.state_storage import Plain, moment_names
from megatron.core.optimizer.unit_state import UnitState
from megatron.core.optimizer.update_rules import build_update_rule, update_segment
from megatron.core.optimizer.weight_average import WeightAverage
from megatron.core.utils.scratch_file import ScratchFile


@dataclass(frozen=True)
class UpdateRound:
    """Segments that are updated one after the other, each with the number of its parameter group."""

    segments: Sequence[tuple[int, StateSegment | Muon]]
    finished: Unit | None = None
    """The unit whose weights have their final values after this round; None: no unit, or unknown."""


class FlatOptimizer(MegatronOptimizer):
    """Applies an update rule to the flat shards of wrapped model chunks. All decisions are made on the device.

    A step whose loss or gradient is not finite changes only the loss scale. With `stop_on_nonfinite`, later steps
    change nothing (`halted`), so that the state stays that of the last good step until the host notices. Gradients that
    overflow under a float16 loss scale do not stop the optimizer.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: Sequence[DistributedDataParallel],
        groups: ProcessGroupCollection,
        overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
        stop_on_nonfinite: bool = False,
    ) -> None:
        self.config = config
        self.groups = groups
        self.stop_on_nonfinite = stop_on_nonfinite
        self.rule = build_update_rule(config)
        self.chunks = list(chunks)
        self.units = [unit for chunk in chunks for unit in chunk.units]
        if not self.units and groups.size("pp") == 1:
            raise UserError("the model has no parameters that need a gradient: there is nothing to optimise")
        fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        offloaded = choose_offloaded([unit.plan.numel for unit in self.units], fraction)
        path = config.optimizer_nvme_offload_path
        file = None if path is None or not any(offloaded) else ScratchFile(path, groups.global_rank)
        self.states = [
            UnitState.begin(unit, self.rule, config, is_offloaded, file)
            for unit, is_offloaded in zip(self.units, offloaded, strict=True)
        ]
        if config.ema_decay is not None:
            self.average = WeightAverage(self.states, self.chunks, config.ema_decay)
        self._check_weight_files()
        self.device = self.chunks[0].device
        self.grad_scaler: GradScaler | None = build_grad_scaler(config, self.device)
        self._no_scale = torch.ones((), dtype=torch.float32, device=self.device)
        self.update_count = torch.zeros((), dtype=torch.float32, device=self.device)
        self.halted = torch.zeros((), dtype=torch.bool, device=self.device)
        self._allowed = torch.ones((), dtype=torch.bool, device=self.device)
        ranges = parameter_ranges(self.units, config, overrides)
        self.param_groups = [self._param_group(settings, members) for settings, members in ranges.items()]
        pieces = list(self._pieces_on_host(list(ranges.values())))
        self._host_pieces = [piece for _, piece in pieces]
        self._units_of_pieces = [unit for unit, _ in pieces]
        self._host_stream = self._stream_of(file)
        self.qk_clip = QKClip.of(self.chunks, groups, self.device)
        self._rounds = list(self._rounds_of(ranges))
        in_files = any(unit.file_shard is not None for unit in self.units)
        if self.qk_clip is not None and self.qk_clip.config.qk_clip and (config.optimizer_cpu_offload or in_files):
            flag = "--optimizer-cpu-offload" if config.optimizer_cpu_offload else "--param-nvme-offload-path"
            raise UserError(f"--qk-clip scales weights on the device: drop {flag}")

    def _check_weight_files(self) -> None:
        """Raises UserError if something reads weights at any time that are in memory only around their use."""
        reads = [
            *(["ema_decay"] if self.config.ema_decay is not None else ()),
            *([f"optimizer {self.config.optimizer}"] if self.config.optimizer in ("muon", "dist_muon") else ()),
            *(["main weights kept as remainders"] if any(state.has_remainder for state in self.states) else ()),
        ]
        if reads and any(unit.file_shard is not None for unit in self.units):
            raise UserError(f"param_nvme_offload_path: not with {reads[0]}, which needs the weights in memory")

    # Groups ----------------------------------------------------------------------------------------------------------

    def _param_group(self, settings: GroupSettings, ranges: Sequence[ParameterRange]) -> dict[str, object]:
        """Returns the dictionary of a group. `lr` is a float64 scalar tensor that a scheduler updates on the device."""
        given = {key: value for key, value in vars(settings).items() if value is not None}
        rate = settings.lr_mult * (settings.max_lr or self.config.lr or 0.0)
        return {
            **given,
            "params": [s.parameter for r in ranges for s in self.units[r.unit].slots if r.start <= s.start < r.stop],
            "lr": torch.tensor(rate, dtype=torch.float64, device=self.device),
            "weight_decay": self.config.weight_decay * settings.wd_mult,
        }

    def _rounds_of(self, ranges: Mapping[GroupSettings, Sequence[ParameterRange]]) -> Iterator[UpdateRound]:
        """Yields the rounds of an update. With sharded state it is one for each unit, so that the first weights that
        forward needs are gathered while others are updated; without, one for all units. Muon exchanges matrices of all
        units at once, so it is first."""
        groups = list(enumerate(ranges.items()))
        yield UpdateRound(
            [
                (number, Muon([self._muon_segment(each) for each in members], self.config, self.groups))
                for number, (settings, members) in groups
                if settings.use_muon
            ]
        )
        others = [(number, members) for number, (settings, members) in groups if not settings.use_muon]
        if all(state.unit.sharding.shards == 1 for state in self.states):
            yield UpdateRound([(number, part) for number, members in others for part in self._segments_of(members)])
            return
        clips = self.qk_clip is not None and self.qk_clip.config.qk_clip  # it changes weights after their update
        for place, state in enumerate(self.states):
            own = [(number, [each for each in members if each.unit == place]) for number, members in others]
            segments = [(number, part) for number, members in own for part in self._segments_of(members)]
            waits = clips or state.is_offloaded or state.unit.gathers_after_all_updates
            yield UpdateRound(segments, None if waits else state.unit)

    def _segments_of(self, ranges: Sequence[ParameterRange]) -> Iterator[StateSegment]:
        """Yields the parts of a group's ranges in this rank's shards."""
        for members in ranges:
            state = self.states[members.unit]
            if not state.is_offloaded:
                first, end = state.unit.shard_range
                start, stop = max(members.start, first) - first, min(members.stop, end) - first
                if start < stop:
                    yield state.segment(start, stop, self.rule)

    def _pieces_on_host(self, groups: Sequence[Sequence[ParameterRange]]) -> Iterator[tuple[Unit, HostPiece]]:
        """Yields the shards of offloaded units in pieces, each with its unit."""
        for number, state in enumerate(self.states):
            first, end = state.unit.shard_range
            segments = [
                (group, max(members.start, first) - first, min(members.stop, end) - first)
                for group, ranges in enumerate(groups)
                for members in ranges
                if members.unit == number
            ]
            if state.is_offloaded and first < end:
                for piece in HostPiece.of_shard(state.segment(0, end - first, self.rule), segments):
                    yield state.unit, piece

    def _stream_of(self, file: ScratchFile | None) -> StateStream:
        """Returns the stream of `_host_pieces`. If they are in a file, their state is in its buffers afterwards."""
        if file is None or not self._host_pieces:
            return StateStream(self.device)
        pinned = self.config.pin_cpu_params and self.device.type == "cuda"
        backing = FileStream(file, [piece.state for piece in self._host_pieces], pinned)
        pairs = zip(self._host_pieces, backing.pieces, strict=True)
        self._host_pieces = [replace(piece, state=state) for piece, state in pairs]
        return StateStream(self.device, backing)

    def _muon_segment(self, members: ParameterRange) -> MuonSegment:
        """Returns the part of a range in this rank's shard. It may be empty; the rank still takes part in the exchange
        of matrices."""
        state = self.states[members.unit]
        unit, (first, end) = state.unit, state.unit.shard_range
        start = min(max(members.start, first), end) - first
        stop = max(start, min(members.stop, end) - first)
        part = slice(start, stop)
        weights = state.weights.part(start, stop).decode()
        momentum = state.moment(MOMENTUM, start, stop).decode() if start < stop else torch.empty_like(weights)
        writes_model = unit.plan.needs_main_weights and not unit.derives_shard
        model_weights = unit.weight_shard[part] if writes_model else None
        gradients = unit.gradient_shard[part]
        return MuonSegment(
            unit, members.start, members.stop, first + start, weights, momentum, gradients, model_weights
        )

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step_on_device(self, loss_is_finite: Tensor | None = None) -> StepUpdate:
        """Clips and updates on the device, without waiting for it."""
        return self.update(self.unscaled_norm(), loss_is_finite)

    def update_only_if(self, allowed: Tensor) -> None:
        """Takes the scalar that every later step reads; see `MegatronOptimizer.update_only_if`."""
        self._allowed = allowed

    def unscaled_norm(self) -> Tensor:
        """Returns the 2-norm of the model's gradient, without the loss scale."""
        return grad_norm(self.units, self.groups, self.chunks[0]) / self.get_loss_scale().double()

    @torch.no_grad()
    def update(self, norm: Tensor, loss_is_finite: Tensor | None = None) -> StepUpdate:
        """Clips by this norm of the gradient and updates the weights; see `step_on_device`."""
        scale = self.get_loss_scale().double()
        gradients_finite = norm.isfinite()
        loss_finite = torch.ones_like(self.halted)
        if loss_is_finite is not None:
            loss_finite = true_on_all_ranks(loss_is_finite, self.groups)
        if self.stop_on_nonfinite:
            # Gradients of a float16 model overflow when the loss scale is too large, which is expected.
            good = loss_finite if self.config.fp16 else loss_finite & gradients_finite
            self.halted |= ~good
        applied = gradients_finite & loss_finite & ~self.halted & self._allowed
        zeros = count_zeros(self.units, self.groups, self.chunks[0]) if self.config.log_num_zeros_in_grad else None
        logit = None if self.qk_clip is None else self.qk_clip.logits.collect()
        self._update(applied, scale * clip_divisor(norm, self.config.clip_grad))
        if self.grad_scaler is not None:
            self.grad_scaler.update(overflowed=~gradients_finite, counted=~self.halted)
        return StepUpdate(norm, applied, zeros, logit)

    def _update(self, applied: Tensor, divisor: Tensor) -> None:
        for chunk in self.chunks:
            chunk.finish_param_sync()  # the all-gather of the previous update, if no forward has waited for it
        self.update_count.add_(applied)
        step = StepInputs(self.update_count, divisor, ~applied)
        for each, after in itertools.pairwise([*self._rounds, UpdateRound(())]):
            if each.finished is not None:
                each.finished.fetch_shard(changes=True)
            if after.finished is not None:
                after.finished.read_ahead()
            for number, segment in each.segments:
                self._update_segment(segment, step, number)
            if each.finished is not None:
                each.finished.mark_updated()
                if not each.finished.shards_weights:
                    each.finished.start_all_gather()
        pieces = self._host_stream.each([piece.state for piece in self._host_pieces])
        units = itertools.pairwise([*self._units_of_pieces, None])
        for on_device, piece, (unit, following) in zip(pieces, self._host_pieces, units, strict=True):
            assert unit is not None
            unit.fetch_shard(changes=True)
            if following is not None:
                following.read_ahead()
            for number, start, stop in piece.segments:
                self._update_segment(on_device.part(start, stop), step, number)
        if self.qk_clip is not None:
            self.qk_clip.clip(self.states, applied, self.config.use_precision_aware_optimizer)
        if self.average is not None:
            self.average.update(applied, self.update_count)
        finished = {each.finished for each in self._rounds}
        for state in self.states:
            if state.unit not in finished:
                state.unit.mark_updated()
        for chunk in self.chunks:
            chunk.start_param_sync()

    def _update_segment(self, segment: StateSegment | Muon, step: StepInputs, number: int) -> None:
        """Updates a segment of a parameter group, or all those that Muon updates."""
        rate, decay = self.param_groups[number]["lr"], self.param_groups[number]["weight_decay"]
        if not isinstance(rate, Tensor):  # a script has set a number
            rate = torch.full((), rate, dtype=torch.float64, device=self.device)
        if isinstance(segment, Muon):
            segment.update(step, rate, decay)
        else:
            update_segment(self.rule, segment, step, rate, decay, self.config.use_precision_aware_optimizer)

    # Queries of the training loop ------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets `.grad` of all parameters to None."""
        for parameter in self.get_parameters():
            parameter.grad = None

    def get_loss_scale(self) -> Tensor:
        """Returns the loss scale, a scalar on the device; 1 without one."""
        return self._no_scale if self.grad_scaler is None else self.grad_scaler.scale

    def get_parameters(self) -> list[nn.Parameter]:
        """Returns all parameters that are updated."""
        return [slot.parameter for unit in self.units for slot in unit.slots]

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """Returns this rank's gradients in the norm, without copies and padding, as one-dimensional views."""
        return [g for grid in ("dense", "expert") for g in counted_gradients(self.units, self.groups, grid)]

    def get_grad_norm(self) -> Tensor:
        """Returns the 2-norm of the whole model's gradient as it is in the buffers, including the loss scale."""
        return grad_norm(self.units, self.groups, self.chunks[0])

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> Tensor:
        """Scales the gradients in the buffers to a norm of at most `clip_grad`; returns the norm before."""
        norm = self.get_grad_norm()
        divisor = clip_divisor(norm, clip_grad)
        for unit in self.units:
            unit.gradient_shard.div_(divisor)
        return norm

    def count_zeros(self) -> Tensor:
        """Returns how many elements of the whole model's gradient are exactly zero, as a float64 scalar tensor."""
        return count_zeros(self.units, self.groups, self.chunks[0])

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The moments of each parameter: shaped as the parameter if units are replicated, else the one-dimensional
        slice in this rank's shard. Moments that are stored in narrow types are copies in the main type."""
        self._host_stream.finish()
        found: dict[nn.Parameter, dict[str, Tensor]] = {}
        for state in self.states:
            whole = state.unit.sharding.shards == 1
            for parameter_slice in state.unit.parameter_slices:
                slot = parameter_slice.slot
                place = (slot.start, slot.stop) if whole else (parameter_slice.start, parameter_slice.stop)
                moments = {name: state.moment(name, *place).decode() for name in self._moments_of(slot)}
                shape = slot.parameter.shape if whole else (-1,)
                found[slot.parameter] = {name: moment.view(shape) for name, moment in moments.items()}
        return found

    def _moments_of(self, slot: ParameterSlot) -> tuple[str, ...]:
        return moment_names(slot, self.rule.moments, self.config)

    # State -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Continues from the model's weights, after they were changed from outside."""
        self._host_stream.finish()
        for state in self.states:
            state.reload()
        if self.average is not None:
            self.average.restart()

    @torch.no_grad()
    def after_load(self) -> None:
        """Gathers the model's weights if the load wrote main weights with remainders, because it writes only this
        rank's shard."""
        written = [state.unit for state in self.states if state.has_remainder]
        for unit in written:
            unit.mark_updated()
        for chunk in self.chunks if written else ():
            chunk.start_param_sync(force_sync=True)

    def state_chunks(self) -> Iterator[Chunk]:
        """Yields this rank's main weights and moments as chunks that share their memory. Waits for copies to host
        memory."""
        self._host_stream.finish()
        for number, state in enumerate(self.states):
            for parameter_slice in state.unit.parameter_slices:
                holders = replica_ranks(parameter_slice.info, self.groups, state.unit.sharding)
                place = parameter_slice.start, parameter_slice.stop
                kinds = {name: state.moment(name, *place) for name in self._moments_of(parameter_slice.slot)}
                if state.unit.plan.needs_main_weights:
                    kinds[MASTER] = state.weights.part(*place)
                if self.average is not None:
                    kinds[AVERAGE] = self.average.values[number].part(*place)
                for kind, stored in kinds.items():
                    # Numbers in one tensor are saved as they are, others in the main type.
                    encoded, kept = None if isinstance(stored, Plain) else stored, kept_as(stored)
                    meta = torch.empty(place[1] - place[0], dtype=stored.main, device="meta")
                    tensor = kept.tensor if isinstance(kept, Plain) else meta
                    yield optimizer_state_chunk(
                        kind, parameter_slice.info, tensor, parameter_slice.flat_range, holders, encoded
                    )

    def common_state(self) -> dict[str, object]:
        """Returns the number of updates and the state of the loss scale. Waits for the device."""
        scaler = self.grad_scaler.state_dict() if self.grad_scaler is not None else None
        return {"update_count": int(self.update_count.item()), "grad_scaler": scaler}

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Loads what `common_state` returned."""
        self.update_count.fill_(state["update_count"])
        if self.grad_scaler is not None and state["grad_scaler"] is not None:
            self.grad_scaler.load_state_dict(state["grad_scaler"])
