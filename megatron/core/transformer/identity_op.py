"""Operations that change nothing, for parts that a spec leaves out."""

from typing import Any

from torch import nn


class IdentityOp(nn.Module):
    """Returns its first argument."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, x: Any, *args: object, **kwargs: object) -> Any:
        """Returns x and ignores the other arguments."""
        return x


class IdentityFuncOp(IdentityOp):
    """Returns a function that returns its first argument."""

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Returns the identity function and ignores its arguments."""
        return super().forward
