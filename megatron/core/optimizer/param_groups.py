"""Parameter groups: parameters with the same learning rate and weight decay, and their ranges in the units."""

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed.flat_buffer import Unit
from megatron.core.optimizer.muon_matrices import MUON, takes_muon
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parameters import ParameterInfo

_QK_NORMS = ("q_layernorm", "k_layernorm")


@dataclass(frozen=True)
class ParamKey:
    """Selects the parameters whose canonical name matches one of the shell patterns (* ? [abc])."""

    name: str | tuple[str, ...]

    def matches(self, parameter_name: str) -> bool:
        """Whether a canonical name matches one of the patterns."""
        patterns = (self.name,) if isinstance(self.name, str) else self.name
        return any(fnmatch.fnmatchcase(parameter_name, pattern) for pattern in patterns)


ParamGroupOverride = Mapping[str, Any]
"""Settings of the selected parameters: any of max_lr, min_lr, wd_mult, lr_mult, start_wd, end_wd."""


@dataclass(frozen=True)
class GroupSettings:
    """The settings of the parameters of one group. None means the setting of the whole run."""

    wd_mult: float = 1.0
    lr_mult: float = 1.0
    max_lr: float | None = None
    min_lr: float | None = None
    start_wd: float | None = None
    end_wd: float | None = None
    is_decoupled_lr: bool = False
    is_expert_parallel: bool = False
    use_muon: bool | None = None


def settings_of(
    info: ParameterInfo, config: OptimizerConfig, overrides: Mapping[ParamKey, ParamGroupOverride] | None = None
) -> GroupSettings:
    """Returns the settings of one parameter. If several overrides match, later ones replace earlier ones field by
    field."""
    decays = info.decays or (config.apply_wd_to_qk_layernorm and _is_qk_norm_weight(info))
    chosen: dict[str, Any] = {
        "wd_mult": 1.0 if decays else 0.0,
        "is_expert_parallel": info.grid == "expert",
    }
    if config.decoupled_lr is not None and info.embedding_or_output:
        chosen |= {"max_lr": config.decoupled_lr, "min_lr": config.decoupled_min_lr, "is_decoupled_lr": True}
    if config.mup_width_mult != 1.0:
        sgd = config.optimizer == "sgd"
        if sgd != info.grows_with_width:
            chosen["lr_mult"] = config.mup_width_mult if sgd else 1.0 / config.mup_width_mult
    for key, override in (overrides or {}).items():
        if key.matches(info.name):
            chosen |= override
    return GroupSettings(**chosen)


def describe_groups(
    units: Sequence[Unit],
    config: OptimizerConfig,
    overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
) -> dict[str, dict[str, object]]:
    """Returns the settings of the group of each parameter in the units, by the parameter's canonical name. Settings
    that equal those of the whole run are left out."""
    found = {}
    for info in (slot.info for unit in units for slot in unit.slots):
        settings = dataclasses.asdict(settings_of(info, config, overrides))
        found[info.name] = {key: value for key, value in settings.items() if value is not None}
    return found


def _is_qk_norm_weight(info: ParameterInfo) -> bool:
    path = info.name.split(".")
    return path[-1] == "weight" and len(path) > 1 and path[-2] in _QK_NORMS


@dataclass(frozen=True)
class ParameterRange:
    """Neighbouring slots of a unit in one group: elements [start, stop) of its buffers, including alignment."""

    unit: int
    """Index of the unit."""
    start: int
    stop: int


def parameter_ranges(
    units: Sequence[Unit],
    config: OptimizerConfig,
    overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
) -> dict[GroupSettings, list[ParameterRange]]:
    """Returns the ranges of every group. Groups are in the order of their first parameter, those with weight decay
    first."""
    groups: dict[GroupSettings, list[ParameterRange]] = {}
    for number, unit in enumerate(units):
        for settings, start, stop in _ranges_of(unit, config, overrides):
            groups.setdefault(settings, []).append(ParameterRange(number, start, stop))
    return dict(sorted(groups.items(), key=lambda group: group[0].wd_mult == 0.0))


def _ranges_of(
    unit: Unit, config: OptimizerConfig, overrides: Mapping[ParamKey, ParamGroupOverride] | None
) -> Iterator[tuple[GroupSettings, int, int]]:
    begun: tuple[GroupSettings, int] | None = None
    for slot in unit.slots:
        settings = settings_of(slot.info, config, overrides)
        if config.optimizer in MUON:
            settings = dataclasses.replace(settings, use_muon=takes_muon(slot.parameter, slot.info, config))
        if begun is None or settings != begun[0]:
            if begun is not None:
                yield (*begun, slot.start)
            begun = (settings, slot.start)
    if begun is not None:
        yield (*begun, unit.plan.numel)
