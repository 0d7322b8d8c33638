"""Conversion of models between the Hugging Face hub's format and checkpoints of this project.

A family (`families.py`) is data: which hub tensor is which part of a canonical tensor, and which key of config.json
corresponds to which flag. `importing.py` and `exporting.py` copy the tensors one at a time, so the memory needed does
not grow with the model. `verification.py` compares the logits of both formats.
"""
