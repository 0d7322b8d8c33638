"""Turns .jsonl files into .bin and .idx files with several processes. The result does not depend on their number.

The input is cut into blocks of bytes, and a line belongs to the block that contains its first byte (`blocks`). Workers
take blocks, read the texts of their lines (`records`), encode them (`batches`) and append the ids to their own files,
the shards (`shards`, `worker`). They send only counts (`messages`). The parent process (`prepare`) merges the shards in
the order of the input (`merging`) and writes a `manifest`. A journal lets a killed run continue (`resuming`).
"""
