"""Optimizers that update the flat buffers of models wrapped in DistributedDataParallel."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer.chained import ChainedOptimizer
from megatron.core.optimizer.external import ExternalOptimizer
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepUpdate
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroupOverride, ParamKey, describe_groups

__all__ = [
    "ChainedOptimizer",
    "ConstantGradScaler",
    "DynamicGradScaler",
    "ExternalOptimizer",
    "FlatOptimizer",
    "MegatronOptimizer",
    "OptimizerConfig",
    "ParamGroupOverride",
    "ParamKey",
    "StepUpdate",
    "get_megatron_optimizer",
]


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    stop_on_nonfinite: bool = False,
) -> MegatronOptimizer:
    """Returns the optimizer of a config for model chunks that are wrapped in DistributedDataParallel.

    `config_overrides` has other settings for the parameters that a `ParamKey` matches. `stop_on_nonfinite`: see
    `FlatOptimizer`. `use_gloo_process_groups` has no effect. `dump_param_to_param_group_map` is a path: the first rank
    writes the settings of each parameter's group to it, as JSON (collective). Raises UserError for a chunk that is not
    wrapped, because the optimizer updates the buffers of the wrapper.
    """
    chunks = []
    for chunk in model_chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise UserError(
                f"get_megatron_optimizer was given a {type(chunk).__name__}: wrap it in "
                "megatron.core.distributed.DistributedDataParallel first (in a single process too)"
            )
        chunks.append(chunk)
    if not chunks:
        raise UserError("get_megatron_optimizer was given no model chunk")
    groups = pg_collection.freeze() if pg_collection is not None else chunks[0].pg_collection
    if dump_param_to_param_group_map is not None:
        units = [unit for chunk in chunks for unit in chunk.units]
        _write_groups(Path(dump_param_to_param_group_map), describe_groups(units, config, config_overrides))
    return FlatOptimizer(config, chunks, groups, config_overrides, stop_on_nonfinite)


def _write_groups(path: Path, groups: Mapping[str, Mapping[str, object]]) -> None:
    """Writes the settings of all ranks' parameters, on the first rank. Raises UserError on all ranks if it cannot."""
    ranks = RankCoordinator()
    known = {name: settings for each in ranks.gather(groups) for name, settings in each.items()}

    def write() -> None:
        try:
            path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--dump-param-to-param-group-map {path}: {error.strerror}") from None

    ranks.run_on_first(write)
