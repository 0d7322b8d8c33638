"""Tokenizers: one file a family, `base.Tokenizer` their common face, `build.build_tokenizer` the one way to get one."""
