"""--dry-run: what a run would be, without process groups, devices or memory."""
