"""Context parallelism: each rank holds a part of every row of tokens.

All layers but attention work on the tokens of this rank as on any others. Attention's queries meet the keys of all
ranks, which come in one of the ways that `--cp-comm-type` names.
"""

from megatron.core.context_parallel.splitting import cut_rows, sequence_part

__all__ = ["cut_rows", "sequence_part"]
