"""Context parallelism: each rank holds a part of every row of tokens.

All layers except attention work on the rank's own tokens. In attention, queries need the keys of all ranks;
`--cp-comm-type` chooses how the ranks exchange them.
"""

from megatron.core.context_parallel.splitting import cut_rows, sequence_part

__all__ = ["cut_rows", "sequence_part"]
