"""The canonical tensors of a model, from a build of it without memory."""

from collections.abc import Callable

import torch
from torch import nn

from megatron.core.parameters import canonical_names, info_of
from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import Environment, default_groups, groups_of_rank
from megatron.training.providers import Context, Stage
from megatron.training.state import TrainState
from megatron.training.tokenizer.null import NullTokenizer

BuildModel = Callable[[Context, Stage], nn.Module]
"""The piece of a training script that builds its model."""


def canonical_shapes(config: PretrainConfig, build_model: BuildModel, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of the model that a config for one process describes, by name, in the model's order."""
    groups, pipeline = groups_of_rank(config, 0), pipeline_of(config.transformer)
    environment = Environment(0, 1, torch.device("meta"), groups, pipeline.loss_rank)
    context = Context(config, environment, NullTokenizer(vocab_size - 1, None, None), TrainState())
    with torch.device("meta"), default_groups(groups, pipeline):
        model = build_model(context, Stage())
    infos = [info_of(parameter) for _, parameter in canonical_names(model)]
    return {info.name: info.global_shape for info in infos}
