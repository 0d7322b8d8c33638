"""Dropout masks that are functions of a token's position in the run, and dropout with bias and residual."""
