"""From a plain model chunk to what is trained: the one ordered list of wrappings.

Tensor, sequence, context and expert parallelism change the formula, so they live in the layers. All the rest wraps,
here, from the inside out: number format, data parallel units. Recompute is inside of both: a stack of layers wraps its
own, as its config says, when it is built (`megatron.core.transformer.recompute`), so that a loop over megatron.core
alone has it too.
"""

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.initialize import Environment


def parallelize(chunk: nn.Module, config: PretrainConfig, environment: Environment) -> DistributedDataParallel:
    """Wrap one model chunk, moving it to the device of this process; one without memory gets it there, unit by unit."""
    transformer = config.model.transformer
    if not any(parameter.is_meta for parameter in chunk.parameters()):
        chunk = chunk.to(environment.device)
    if transformer.params_dtype is not torch.float32:
        chunk = Float16Module(transformer, chunk) if transformer.fp16 or transformer.bf16 else chunk
    return DistributedDataParallel(
        transformer, config.ddp, chunk, pg_collection=environment.groups, device=environment.device
    )
