"""Whole models: embedding, stack of layers, head."""
