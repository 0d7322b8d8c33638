"""Text generation: the cache of keys and values, the choice of the next token, and the loop."""
