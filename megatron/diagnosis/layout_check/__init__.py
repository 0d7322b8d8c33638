"""Checks that a layout computes what one process does: shrinks a user's run, records both runs, compares them."""
