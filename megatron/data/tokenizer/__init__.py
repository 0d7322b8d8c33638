"""Tokenizers: one file per family, with the base class `base.Tokenizer`. `build.build_tokenizer` makes one."""
