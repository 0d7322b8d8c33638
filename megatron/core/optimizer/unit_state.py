"""The optimizer's state of one unit's shard."""

from dataclasses import dataclass, field

from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.fp8_unit import Fp8Unit
from megatron.core.optimizer.host_state import in_host_memory
from megatron.core.optimizer.nvme_state import in_file, kept_as
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.segments import StateSegment
from megatron.core.optimizer.state_storage import (
    StateTensor,
    WithRemainder,
    moment_ranges,
    new_moment,
    new_weights,
    rounds_to_model_weights,
)
from megatron.core.optimizer.update_rules import UpdateRule
from megatron.core.utils.scratch_file import ScratchFile


@dataclass
class UnitState:
    """The optimizer's state of one unit's shard: flat tensors, stored as the config says."""

    unit: Unit
    weights: StateTensor
    """The main weights: the unit's shard itself, or separate memory if the model's type is narrower than the main
    type."""
    moments: dict[str, StateTensor] = field(default_factory=dict)
    """The moments. Each covers the shard from the first to the last parameter that has this moment: see `ranges`."""
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Elements [start, stop) of the shard that each moment covers."""
    is_offloaded: bool = False
    """Whether the state is in host memory or in a file, except weights that the model itself uses."""

    @classmethod
    def begin(
        cls,
        unit: Unit,
        rule: UpdateRule,
        config: OptimizerConfig,
        is_offloaded: bool = False,
        file: ScratchFile | None = None,
    ) -> "UnitState":
        """Returns the initial state of a unit: its weights, and moments of zero. Offloaded state is in `file` if there
        is one."""
        unit.fetch_shard()
        weights, main = new_weights(unit.plan, unit.weight_shard, config), unit.plan.main_dtype
        ranges = moment_ranges(unit.plan, unit.shard_range, rule.moments, config)
        moments = {
            name: new_moment(name, stop - start, config, main, unit.device) for name, (start, stop) in ranges.items()
        }
        if is_offloaded:
            numel = unit.shard_range[1] - unit.shard_range[0]

            def offload(state: StateTensor) -> StateTensor:
                return in_host_memory(state, config.pin_cpu_params) if file is None else in_file(file, state, numel)

            moments = {name: offload(moment) for name, moment in moments.items()}
            if unit.plan.needs_main_weights:
                weights = offload(weights)
        if isinstance(unit, Fp8Unit) and rounds_to_model_weights(unit.plan, config, is_offloaded):
            unit.derive_shard_from(weights.decode())
        return cls(unit, weights, moments, ranges, is_offloaded)

    @property
    def has_remainder(self) -> bool:
        """Whether the main weights are kept as the difference to the model's weights."""
        return isinstance(kept_as(self.weights), WithRemainder)

    def moment(self, name: str, start: int, stop: int) -> StateTensor:
        """Returns the elements [start, stop) of the shard of a moment."""
        first = self.ranges[name][0]
        return self.moments[name].part(start - first, stop - first)

    def segment(self, start: int, stop: int, rule: UpdateRule) -> StateSegment:
        """Returns the elements [start, stop) of the shard."""
        self.unit.fetch_shard()  # no part can be taken of a tensor without memory
        has_main = self.unit.plan.needs_main_weights
        writes_model = has_main and not self.unit.derives_shard
        return StateSegment(
            self.weights.part(start, stop),
            self.unit.gradient_shard[start:stop],
            {name: self.moment(name, start, stop) for name in rule.moments},
            self.unit.weight_shard[start:stop] if writes_model else None,
            has_main,
        )

    def reload(self) -> None:
        """Copies the model's weights to the main weights."""
        if self.unit.plan.needs_main_weights:
            self.weights.encode(self.unit.model_shard().to(self.weights.main))
