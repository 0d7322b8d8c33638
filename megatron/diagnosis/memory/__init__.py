"""The peak memory of each rank, predicted without devices.

The run's own code computes a micro-batch of each model chunk on the meta device, as it would on a GPU. Each tensor that
it creates is counted from its creation to its end (`allocations`), so nothing about a model, an operation or a flag is
stated twice. The action list of a rank says how many micro-batches it keeps (`over_actions`).
"""
