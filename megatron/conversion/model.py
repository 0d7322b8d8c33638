"""Models for conversion: their canonical tensors without memory, or the whole model on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.dist_checkpointing.checkpoint import Checkpoint
from megatron.core.dist_checkpointing.chunk import model_chunks
from megatron.core.dist_checkpointing.planning import match
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box, canonical_names, info_of
from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.data.tokenizer.null import NullTokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import Environment, default_groups, groups_of_rank
from megatron.training.providers import Context, Stage, stages_of_rank
from megatron.training.state import TrainState

BuildModel = Callable[[Context, Stage], nn.Module]
"""Model provider of a training script."""


@dataclass(frozen=True)
class RankTensor:
    """A tensor of our model on one rank: its name in the rank's module, and the part of the canonical tensor."""

    local_name: str
    name: str
    global_shape: tuple[int, ...]
    box: Box


_EMBEDDING = "embedding.word_embeddings.weight"


def vocab_size_of(checkpoint: Checkpoint) -> int:
    """Returns the vocabulary size, without padding. Raises UserError if the checkpoint has no embedding."""
    if _EMBEDDING not in checkpoint.catalogue:
        raise UserError(f"{checkpoint.folder} has no {_EMBEDDING}")
    return checkpoint.catalogue[_EMBEDDING][0].chunk.global_shape[0]


def build_on(device: torch.device, config: PretrainConfig, build_model: BuildModel, vocab_size: int) -> nn.Module:
    """Builds the model of a config for one process on a device, which may be `meta`."""
    groups, pipeline = groups_of_rank(config, 0), pipeline_of(config.transformer)
    environment = Environment(0, 1, device, groups, pipeline.loss_rank)
    context = Context(config, environment, NullTokenizer(vocab_size - 1, None, None), TrainState())
    with device, default_groups(groups, pipeline):
        return build_model(context, Stage())


def canonical_shapes(config: PretrainConfig, build_model: BuildModel, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the model's canonical tensors by name, in the model's order, without allocating them."""
    model = build_on(torch.device("meta"), config, build_model, vocab_size)
    infos = [info_of(parameter) for _, parameter in canonical_names(model)]
    return {info.name: info.global_shape for info in infos}


def tensors_of_rank(
    config: PretrainConfig, build_model: BuildModel, vocab_size: int, rank: int
) -> list[list[RankTensor]]:
    """Returns the tensors of each model chunk of a rank of the run, without allocating them."""
    groups, pipeline = groups_of_rank(config, rank), pipeline_of(config.transformer)
    environment = Environment(rank, config.world_size, torch.device("meta"), groups, pipeline.loss_rank)
    context = Context(config, environment, NullTokenizer(vocab_size - 1, None, None), TrainState())
    with torch.device("meta"), default_groups(groups, pipeline):
        chunks = [build_model(context, stage) for stage in stages_of_rank(config, groups.rank("pp"))]
    described = []
    for chunk in chunks:
        infos = [(name, info_of(parameter)) for name, parameter in chunk.named_parameters()]
        described.append([RankTensor(name, info.name, info.global_shape, info.box) for name, info in infos])
    return described


def load_on_cpu(checkpoint: Checkpoint, config: PretrainConfig, build_model: BuildModel, vocab_size: int) -> nn.Module:
    """Returns the model of a checkpoint on the CPU, in evaluation mode.

    `config` is the checkpoint's, for one process. Raises UserError for damaged or missing tensors.
    """
    model = build_on(torch.device("cpu"), config, build_model, vocab_size)
    fill_tensors(checkpoint, match(model_chunks(model, lambda info: ()), checkpoint.catalogue))
    return model.eval()
