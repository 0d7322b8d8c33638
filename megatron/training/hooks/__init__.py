"""Hooks: actions that only some runs take (profiling, manual garbage collection, early exit), one file each."""
