"""Schedules of micro-batches: orders as data, and what runs them."""

from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
