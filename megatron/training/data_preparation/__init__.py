"""Turns .jsonl files into .bin and .idx files with several processes. The result does not depend on their number.

A line belongs to the block of the input that contains its first byte (`blocks`). Workers take blocks, read the texts of
their lines (`records`), encode them and append the ids to shards, files of their own (`shards`, `worker`). They send
only counts. The parent process merges the shards in the order of the input (`merging`) and writes a `manifest`.
"""
