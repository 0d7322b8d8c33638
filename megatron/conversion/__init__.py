"""Conversion between checkpoints of this project and other formats: those of the Hugging Face hub here, those of
Megatron-LM in `megatron_lm/`.

A family (`families.py`) is data: which hub tensor is which part of a canonical tensor, and which key of config.json
corresponds to which flag. `importing.py` and `exporting.py` copy the tensors one at a time, so the memory needed does
not grow with the model. `verification.py` compares the logits of both formats.
"""
