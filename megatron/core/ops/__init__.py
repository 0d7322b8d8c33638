"""Operations of a transformer, one a file: the plain torch reference, and faster ones under the same signature.

`operations.py` of a folder is the record of its operations; `megatron.core.backends` chooses among the records when a
layer is built.
"""
