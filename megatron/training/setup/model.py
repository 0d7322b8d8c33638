"""Builds and wraps the model chunks and the optimizer. `parallelize` is the one ordered list of wrappers.

Tensor, sequence, context and expert parallelism change the formula, so they are part of the layers. The wrappers here
are, from the inside out: number format, data parallel units. Recompute is inside both: a stack of layers wraps its own
layers when it is built, as its config says (`megatron.core.transformer.recompute`). So a training loop that uses
megatron.core alone has recompute too.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.exceptions import UserError
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.external import ExternalOptimizer
from megatron.core.transformer.module import Float16Module
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import Environment
from megatron.training.providers import Context, Stage, stages_of_rank


def parallelize(chunk: nn.Module, config: PretrainConfig, environment: Environment) -> DistributedDataParallel:
    """Wraps one model chunk and moves it to the device of this process. A chunk on the meta device is created on the
    device unit by unit."""
    transformer = config.model.transformer
    if not any(parameter.is_meta for parameter in chunk.parameters()):
        chunk = chunk.to(environment.device)
    if transformer.params_dtype is not torch.float32:
        chunk = Float16Module(transformer, chunk) if transformer.fp16 or transformer.bf16 else chunk
    return DistributedDataParallel(
        transformer, config.ddp, chunk, pg_collection=environment.groups, device=environment.device
    )


def build_model(context: Context, build_chunk: Callable[[Context, Stage], nn.Module]) -> list[DistributedDataParallel]:
    """Builds and wraps this rank's model chunks, one for each of its virtual pipeline stages.

    With --init-model-with-meta-device `build_chunk` runs on the meta device, so that a chunk takes no memory until it
    is wrapped.
    """
    config, environment = context.config, context.environment
    on_meta = config.transformer.init_model_with_meta_device
    chunks = []
    for stage in stages_of_rank(config, environment.groups.rank("pp")):
        with torch.device("meta") if on_meta else contextlib.nullcontext():
            chunk = build_chunk(context, stage)
        chunks.append(parallelize(chunk, config, environment))
    return chunks


def build_optimizer(
    context: Context,
    model: Sequence[nn.Module],
    build_own: Callable[[Context, Sequence[nn.Module]], Any] | None = None,
) -> MegatronOptimizer:
    """Returns the optimizer that the flags describe, or the script's own optimizer, wrapped if it is a plain torch
    optimizer."""
    config = context.config
    if build_own is None:
        return get_megatron_optimizer(
            config.optimizer,
            model,
            pg_collection=context.environment.groups,
            dump_param_to_param_group_map=config.schedule.dump_param_to_param_group_map,
            stop_on_nonfinite=stops_on_nonfinite(config),
        )
    if config.optimizer.ema_decay is not None:
        raise UserError("--ema-decay: the script's own optimizer keeps no average of the weights; leave the flag out")
    own = build_own(context, model)
    return own if isinstance(own, MegatronOptimizer) else ExternalOptimizer(config.optimizer, own, model)


def stops_on_nonfinite(config: PretrainConfig) -> bool:
    """Whether a non-finite loss or gradient ends the run; otherwise only that update is skipped."""
    resilience = config.resilience
    return resilience.check_for_nan_in_loss_and_grad and resilience.nonfinite_action == "stop"
