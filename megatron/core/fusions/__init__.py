"""Published names of fused operations."""
