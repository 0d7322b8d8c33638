"""Base class of language models."""
