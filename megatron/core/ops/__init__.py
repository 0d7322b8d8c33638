"""Operations of a transformer, one a file: the plain torch reference, and faster ones under the same signature.

`megatron.core.backends` chooses among them when a layer is built.
"""
