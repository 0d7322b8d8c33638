"""From datasets to the micro-batches of a run."""
