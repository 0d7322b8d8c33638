"""Data: token files and samples (datasets), text to token files (preparation), text to ids and back (tokenizer)."""
