"""Whether a layout computes what one process does: a user's run made small, watched under both, and compared."""
