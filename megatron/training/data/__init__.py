"""Makes the micro-batches of a run from its data sets."""
