"""Parts that a spec leaves out."""

from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp


def test_identities() -> None:
    assert IdentityOp(1, a=2)(5, 6) == 5
    assert IdentityFuncOp()(1, 2)(5) == 5
