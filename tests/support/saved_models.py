"""Checkpoints with weights that are worth generating from."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.chunk import model_chunks
from megatron.core.dist_checkpointing.writing import save
from megatron.core.parameters import info_of
from megatron.data.tokenizer.build import build_tokenizer
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.run_description import describe_run
from megatron.training.launch.environment import process_environment
from megatron.training.providers import Context, Stage
from megatron.training.state import TrainState
from tools.entry_scripts import build_model


def save_random_model(root: Path, words: Sequence[str]) -> None:
    """Saves what a run with these flags saves after step 3, with large random weights."""
    config = configure(list(words), launch_environment=LaunchEnvironment(1, False))
    with process_environment(config) as environment:
        context = Context(config, environment, build_tokenizer(config.tokenizer), TrainState())
        model = build_model(context, Stage()).cpu()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                own = parameter.view(-1)[: info_of(parameter).box.numel]
                own.copy_(torch.randn(own.shape, generator=generator))
    chunks = model_chunks(model, lambda info: ())
    save(root, chunks, step=3, common={}, config=describe_run(config), layout={})
