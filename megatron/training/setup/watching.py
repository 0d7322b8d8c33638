"""What watches a run: judges of losses, the probe of gradients, checks of results, the search for slow ranks, the mix
of its data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from megatron.core.health.rerun_state_machine import (
    RerunErrorInjector,
    RerunStateMachine,
    initialize_rerun_state_machine,
)
from megatron.core.health.straggler_detector import StragglerDetector
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.optimizer import MegatronOptimizer
from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.staged_blend import StagedBlend
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.sources import source_keys, source_names
from megatron.training.hooks.mix_report import Mix
from megatron.training.launch.environment import Environment
from megatron.training.log.finite import GradientProbe
from megatron.training.loss_spikes import LossSpikes
from megatron.training.providers import ForwardStep


def build_loss_spikes(
    config: PretrainConfig, environment: Environment, optimizer: MegatronOptimizer
) -> LossSpikes | None:
    """Returns the object that judges the losses, and makes the optimizer's updates depend on it; None without
    --loss-spike-action. Raises UserError for an optimizer that cannot leave out an update."""
    if config.resilience.loss_spike_action is None or config.evaluation.skip_train:
        return None
    spikes = LossSpikes(config.resilience, environment.groups, environment.device)
    optimizer.update_only_if(spikes.update_allowed)
    return spikes


def build_probe(config: PretrainConfig, model: Sequence[nn.Module]) -> GradientProbe | None:
    """Returns the probe of the gradient at the output of the embedding; that gradient has passed through every layer.
    None if losses and gradients are not checked or this rank has no embedding."""
    if not config.resilience.check_for_nan_in_loss_and_grad:
        return None
    embeddings = [module for chunk in model for module in chunk.modules() if isinstance(module, LanguageModelEmbedding)]
    return GradientProbe(embeddings[0]) if embeddings else None


def build_rerun_state_machine(config: PretrainConfig) -> RerunStateMachine:
    """Returns the machine of this process, which checks the results that a script's loss function validates."""
    flags = config.resilience
    injector = RerunErrorInjector(flags.error_injection_rate, flags.error_injection_type, config.seed)
    return initialize_rerun_state_machine(
        flags.rerun_mode, injector, leaves_non_finite=flags.check_for_nan_in_loss_and_grad
    )


def timed_forward_step(forward_step: ForwardStep, config: PretrainConfig, environment: Environment) -> ForwardStep:
    """Sets up the straggler detector of this process. Returns the forward step, measured with --log-straggler."""
    detector, flags = StragglerDetector(), config.logging
    detector.configure(
        environment.world_size,
        environment.rank,
        mmcnt=flags.straggler_minmax_count,
        enabled=flags.log_straggler and not flags.disable_straggler_on_startup,
    )
    if not flags.log_straggler:
        return forward_step

    def step(*args: Any, **kwargs: Any) -> Any:
        with detector:
            return forward_step(*args, **kwargs)

    return step


def mix_of(config: PretrainConfig, dataset: object) -> Mix | None:
    """Returns the object that counts what a run draws from its data sets; None for made-up data, for data sets of a
    script, and for a blend that is not read in its own order."""
    keys, names = source_keys(config), source_names(config)
    is_blend = isinstance(dataset, BlendedDataset | StagedBlend)
    in_order = (config.data.dataloader_type or "single") == "single"
    if len(keys) == 1 and (isinstance(dataset, MegatronDataset) or (is_blend and in_order)):
        return Mix(dataset, keys, [Path(keys[0]).name])
    return Mix(dataset, keys, names) if names and is_blend and in_order else None
