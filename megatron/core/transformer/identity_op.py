"""Operations that change nothing, for places in a spec that a model leaves empty."""

from typing import Any

from torch import nn


class IdentityOp(nn.Module):
    """Gives back its first argument."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, x: Any, *args: object, **kwargs: object) -> Any:
        """x, whatever else is given."""
        return x


class IdentityFuncOp(IdentityOp):
    """Gives a function that gives back its first argument."""

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The identity function, whatever is given."""
        return super().forward
