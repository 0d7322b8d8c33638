"""Cleans text before it is prepared: removes duplicates (`dedup`) and rows that break rules of quality (`filtering`).

Every input file becomes a file of plain lines (`rows`), which is divided into blocks. Workers scan the blocks and write
one small file per block into a working folder (`running`), so a killed run continues. `shingles` and `near_duplicates`
have the kernels for word n-grams, MinHash and locality-sensitive hashing; `quality` has the rules.
"""
