"""Datasets: token files, samples that are cut from them, blends, and the builder of train, valid and test datasets."""
