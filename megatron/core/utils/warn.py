"""Warnings that a run prints only once, for all its ranks and steps."""

import functools
import logging
import os
from collections.abc import Iterable
from typing import Any

import torch

from megatron.core.utils.url_keys import hide_keys


def warn_on_first_rank(message: str) -> None:
    """Logs a warning once in this process, on the first rank only. Messages of `leave_out` are not logged."""
    if message not in _left_out and is_first_rank():
        _warn_once(message)


_left_out: set[str] = set()


def leave_out(messages: Iterable[str]) -> None:
    """Keeps `warn_on_first_rank` from logging these messages, because the caller prints them. An earlier run of this
    process may have left out others, which are logged again."""
    _left_out.clear()
    _left_out.update(messages)


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("megatron.core").warning(hide_keys(message))


def is_first_rank() -> bool:
    """Returns whether this process is the run's rank 0, or not part of a run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Megatron-LM's name: logger.log(*args, **kwargs) on one rank of the world, or where there is no world."""
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not initialized or torch.distributed.get_rank() == rank:
        logger.log(*args, **kwargs)
