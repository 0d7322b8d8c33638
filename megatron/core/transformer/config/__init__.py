"""The fields of TransformerConfig, one file a concern."""
