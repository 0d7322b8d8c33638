"""Bias, dropout and residual in one operation, under Megatron-LM's name."""

from collections.abc import Callable

from torch import Tensor

from megatron.core.ops.dropout.dropout import DropoutRngPosition, bias_dropout_add, dropout_tokens
from megatron.core.tokens import Tokens

BiasDropoutAdd = Callable[..., Tensor]


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Returns a function (x_with_bias, residual, prob, place=None) -> residual + dropout(x + bias). `x_with_bias` is
    the pair ([..., h], [h] or None) that a linear layer with `skip_bias_add` returns. In training the mask is a
    function of `place`; without a place its seed comes from torch's default generator. `fused` has no effect: the
    backend chooses the kernel."""

    def bias_dropout_add_func(
        x_with_bias: tuple[Tensor, Tensor | None],
        residual: Tensor,
        prob: float,
        place: DropoutRngPosition | None = None,
    ) -> Tensor:
        x, bias = x_with_bias
        flat = x.reshape(-1, x.shape[-1])  # [t, h]
        if training and prob and place is None:
            place = DropoutRngPosition(dropout_tokens(Tokens(flat.shape[0], 1), x.device), 0, "lone")
        output = bias_dropout_add(flat, bias, residual.reshape(flat.shape), prob, place if training else None)
        return output.view(x.shape)

    return bias_dropout_add_func
