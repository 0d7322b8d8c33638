"""Megatron-LM's names for random state. This library needs no random state: initial weights and dropout are functions
of their position."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.core.groups.defaults import tp_group_or_default
from megatron.core.utils.recomputed import Recomputed


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Seeds torch's generators, which initialize layers without a model and seed the dropout of a model called without
    a position in a run. The other arguments have no effect: no random stream here depends on the layout."""
    torch.manual_seed(seed)


class RNGStatesTracker:
    """Replaces Megatron-LM's tracker of named random streams. There is one stream, torch's own."""

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Does nothing; the one stream is used inside."""
        yield

    def get_states(self) -> dict[str, object]:
        """Returns no states."""
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        """Ignores the states."""


CudaRNGStatesTracker = RNGStatesTracker
"""Megatron-LM's name of the tracker."""


def get_data_parallel_rng_tracker_name() -> str:
    """Returns Megatron-LM's name of the random stream that data parallel ranks share. The tracker has one stream."""
    return "data-parallel-rng"


def get_expert_parallel_rng_tracker_name() -> str:
    """Returns Megatron-LM's name of the random stream of experts. The tracker has one stream."""
    return "expert-parallel-rng"


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> RNGStatesTracker:
    """Returns a tracker without streams."""
    return RNGStatesTracker()


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Returns function(*args) and recomputes its intermediate results in backward. With `distribute_saved_activations`
    each tensor parallel rank keeps its part of the tensors in `args`, which must be equal on all ranks."""
    return Recomputed(function, tp_group_or_default(None) if distribute_saved_activations else None)(*args)
