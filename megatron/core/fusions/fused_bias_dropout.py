"""Bias, dropout and residual in one operation, under its published name."""

from collections.abc import Callable

from torch import Tensor

from megatron.core.ops.dropout import DropoutPlace, bias_dropout_add, dropout_tokens
from megatron.core.tokens import Tokens

BiasDropoutAdd = Callable[..., Tensor]


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """A function (x_with_bias, residual, prob, place=None) -> residual + dropout(x + bias).

    `x_with_bias` is the pair that a linear layer with `skip_bias_add` gives. While training, the mask is a function of
    `place`; without one its seed comes from torch's default generator. `fused` changes nothing: the backend chooses.
    """

    def bias_dropout_add_func(
        x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, place: DropoutPlace | None = None
    ) -> Tensor:
        x, bias = x_with_bias
        if training and prob and place is None:
            anywhere = Tokens(seq_length=x.numel() // x.shape[-1], batch_size=1)
            place = DropoutPlace(dropout_tokens(anywhere, x.device), 0, "lone")
        return bias_dropout_add(x, bias, residual, prob, place if training else None)

    return bias_dropout_add_func
