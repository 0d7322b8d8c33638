"""The transformer: blocks of layers, attention, MLP, and the specs that say which class stands where."""
