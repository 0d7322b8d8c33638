"""From .jsonl to .bin and .idx: many processes, one result whatever their number.

A line belongs to the block of the input in which its first byte lies (`blocks`). Workers take blocks, turn their lines
to texts (`records`), texts to ids, and append those to files of their own (`shards`, `worker`); all that they send is
counts. The parent puts the blocks together in the input's order (`stitching`) and says what was made (`manifest`).
"""
