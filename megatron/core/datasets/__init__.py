"""Datasets: token files, samples cut from them, blends, and the builder of a run's three splits."""
