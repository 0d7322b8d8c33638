"""Writing text with a model: what it has seen, which token comes next, and the loop."""
