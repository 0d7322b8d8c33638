"""The linear layers around any kind of attention: from hidden states or latents to heads, and back."""

import math

from torch import nn

from megatron.core.backends import Backend
from megatron.core.communication.collectives import Group, group_size
from megatron.core.exceptions import UserError
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import Spec, build_module, get_module
from megatron.core.transformer.transformer_config import TransformerConfig


def build_heads_projection(
    spec: Spec,
    config: TransformerConfig,
    input_size: int,
    rows: tuple[int, ...],
    *,
    bias: bool,
    name: str,
    tp_group: Group,
    backend: Backend,
    input_is_whole: bool = False,
    separate_heads: tuple[int, ...] = (),
) -> nn.Module:
    """Builds a projection to all heads; each tensor parallel rank computes its own heads. `rows` are the dimensions of
    its output rows: ranks divide the first, and `separate_heads` divides the second into separate matrices. `name` is
    Megatron-LM's name of its communication buffer. With `input_is_whole` the input holds all tokens even under sequence
    parallelism, and the caller sums its gradient over the ranks; with several ranks the spec must then be a
    ColumnParallelLinear."""
    whole = {"input_is_whole": True, "disable_grad_reduce": True} if input_is_whole else {}
    heads = {"separate_heads": separate_heads} if separate_heads else {}
    if whole and group_size(tp_group) > 1 and not issubclass(get_module(spec), ColumnParallelLinear):
        raise UserError(
            f"{get_module(spec).__name__} as linear_{name} of a layer spec: with tensor parallelism it must be a "
            "ColumnParallelLinear"
        )
    return build_module(
        spec,
        input_size,
        math.prod(rows),
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=bias,
        skip_bias_add=False,
        is_expert=False,
        tp_comm_buffer_name=name,
        offer={"tp_group": tp_group, "backend": backend, "canonical_shape": rows, **whole, **heads},
    )


def build_output_projection(
    spec: Spec,
    config: TransformerConfig,
    input_size: int,
    tp_group: Group,
    backend: Backend,
    *,
    bias: bool | None = None,
    name: str = "proj",
) -> nn.Module:
    """Builds the projection from all heads, `input_size` channels together, to hidden states. If `bias` is None, the
    config decides whether it has a bias. `name` is Megatron-LM's name of its communication buffer."""
    if bias is None:
        bias = config.add_bias_linear if config.attention_output_bias is None else config.attention_output_bias
    return build_module(
        spec,
        input_size,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_comm_buffer_name=name,
        offer={"tp_group": tp_group, "backend": backend},
    )
