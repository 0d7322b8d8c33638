"""Published names around random state. Ours needs none: initial weights and dropout are functions of their place."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.core.process_groups_config import default_collection
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
    """Seed torch's generators, from which lone layers draw their weights and a model called without a place in a run
    its dropout. The other arguments change nothing: no stream here depends on the layout."""
    torch.manual_seed(seed)


class RNGStatesTracker:
    """Stands where published code forks a named stream; there is one stream, torch's own."""

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Changes nothing."""
        yield

    def get_states(self) -> dict[str, Any]:
        """No states."""
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        """Takes states that say nothing."""


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> RNGStatesTracker:
    """A tracker without streams."""
    return RNGStatesTracker()


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """function(*args), whose intermediate results are computed again in backward.

    With `distribute_saved_activations` each tensor parallel rank keeps its part of the tensors among `args`, which must
    be equal on all of them.
    """
    return Recomputed(function, default_collection().tp if distribute_saved_activations else None)(*args)
