"""Converts checkpoints of Megatron-LM: `importing.py` reads a run of Megatron-LM, `exporting.py` writes one.

Their checkpoints are pickles, which `inert_pickle.py` reads as plain data. Newer ones (`source.py`, `torch_dist.py`)
have whole tensors; legacy ones (`legacy_source.py`) have a file for each model parallel rank.
"""
