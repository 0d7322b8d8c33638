"""From a plain model chunk to what is trained: the one ordered list of wrappings.

Tensor, sequence, context and expert parallelism change the formula, so they live in the layers. All the rest wraps,
here, from the inside out: recompute, number format, data parallel units.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.initialize import Environment


def parallelize(chunk: nn.Module, config: PretrainConfig, environment: Environment) -> DistributedDataParallel:
    """Wrap one model chunk, moving it to the device of this process."""
    transformer = config.model.transformer
    if transformer.recompute_granularity == "full":
        recompute_layers(chunk, transformer.recompute_method, transformer.recompute_num_layers)
    chunk = chunk.to(environment.device)
    if transformer.params_dtype is not torch.float32:
        chunk = Float16Module(transformer, chunk) if transformer.fp16 or transformer.bf16 else chunk
    # --use-distributed-optimizer is accepted with a printed reason: state is whole on every rank so far.
    whole = dataclasses.replace(config.ddp, use_distributed_optimizer=False, overlap_param_gather=False)
    return DistributedDataParallel(transformer, whole, chunk, pg_collection=environment.groups)


def recompute_layers(chunk: nn.Module, method: str | None, num_layers: int | None) -> None:
    """Keep only some layers' inputs in forward, and compute the rest again in backward (Chen et al. 2016, 1604.06174).

    `uniform`: every run of `num_layers` layers keeps its input. `block`: the first `num_layers` layers of the chunk
    each keep theirs, the others keep everything. The numbers are the same: dropout masks are functions of their place.
    """
    for block in (module for module in chunk.modules() if isinstance(module, TransformerBlock)):
        count = num_layers or 1
        if method == "block":
            for layer in list(block.layers)[:count]:
                layer.forward = recomputed(layer.forward)  # type: ignore[method-assign]
        else:
            block.layers_at_once = count
            block.run_layers = recomputed(block.run_layers)  # type: ignore[method-assign]


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, keeping its inputs and none of its intermediate results for backward."""

    @functools.wraps(function)
    def call(*inputs: Any, **keywords: Any) -> Tensor | Any:
        if not torch.is_grad_enabled():
            return function(*inputs, **keywords)
        # Nothing inside draws from a generator during training, so there is no random state to restore.
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **keywords)

    return call
