"""Models of the Hugging Face hub to our checkpoints and back.

A family (`families.py`) is data: which tensor on disk is which part of which canonical tensor, and which key of
config.json is which flag. `importing.py` and `exporting.py` carry tensors over one at a time; nothing holds the model.
"""
