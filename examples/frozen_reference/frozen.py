"""A second model beside the one that a run trains: frozen, from a checkpoint, in the run's layout. With fully sharded
parameters its weights are sharded too."""

import dataclasses
from pathlib import Path

import torch
from torch import nn

from megatron.core.dist_checkpointing.checkpoint_selection import open_newest
from megatron.core.dist_checkpointing.chunk import SCALING_STATE, optimizer_state_name
from megatron.core.dist_checkpointing.planning import MismatchPolicy
from megatron.core.dist_checkpointing.reading import load
from megatron.core.distributed import DistributedDataParallel
from megatron.core.exceptions import UserError
from megatron.training.providers import Context, Stage
from megatron.training.state import weight_chunks
from megatron.training.trained_model import config_for_one_process
from pretrain_gpt import build_model

_STATE = MismatchPolicy(patterns=(optimizer_state_name("*", "*"), SCALING_STATE))


def frozen_model(context: Context, root: str | None, flag: str) -> nn.Module:
    """Returns the GPT of the newest checkpoint under `root`, in evaluation mode, without gradients.

    It has its own sizes, those that its checkpoint describes, and this run's tensor parallel ranks. Raises UserError
    that names `flag` for a missing folder, and for pipeline stages: a stage would need the hidden states of the stage
    before it, once more for this model.
    """
    ours, groups = context.config, context.environment.groups
    if root is None:
        raise UserError(f"{flag} is missing: the folder of the frozen model's checkpoints")
    if ours.transformer.pipeline_model_parallel_size > 1:
        raise UserError(f"{flag}: the frozen model is whole on each rank; give --pipeline-model-parallel-size 1")
    described = open_newest(Path(root), None, lambda sentence: None).manifest.config
    theirs = config_for_one_process(described, [], has_cuda=context.environment.device.type == "cuda")
    transformer = dataclasses.replace(
        theirs.transformer,
        tensor_model_parallel_size=ours.transformer.tensor_model_parallel_size,
        sequence_parallel=ours.transformer.sequence_parallel,
        context_parallel_size=ours.transformer.context_parallel_size,
    )
    config = dataclasses.replace(theirs, model=dataclasses.replace(theirs.model, transformer=transformer))
    device, ddp = context.environment.device, dataclasses.replace(ours.ddp, param_nvme_offload_path=None)
    whole = build_model(dataclasses.replace(context, config=config), Stage()).to(device).requires_grad_(False)
    model = DistributedDataParallel(transformer, ddp, whole, pg_collection=groups, device=device).eval()
    with torch.no_grad():
        load(Path(root), weight_chunks([model], groups), policy=_STATE, log=lambda sentence: None)
    return model
