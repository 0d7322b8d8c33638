"""Initial weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.config_fields import not_a_flag, too_small


@dataclass(kw_only=True)
class InitializationConfig:
    """Distributions of initial weights."""

    init_method: Callable[[Tensor], Any] | None = not_a_flag(None)
    """Initializes a weight; None: Normal(init_method_std)."""

    output_layer_init_method: Callable[[Tensor], Any] | None = not_a_flag(None)
    """Initializes the output projections of attention and MLP; None: Normal(init_method_std / sqrt(2 * layers))."""

    init_method_std: float = 0.02
    """Standard deviation of initial weights."""

    embedding_init_method: Callable[[Tensor], Any] | None = not_a_flag(None)
    """Initializes the embeddings; None: Normal(embedding_init_method_std)."""

    embedding_init_method_std: float | None = None
    """Standard deviation of initial embeddings. Default: --init-method-std."""

    init_model_with_meta_device: bool = False
    """Build the model without allocating memory; memory is allocated unit by unit as the model is sharded. For models
    that no rank can hold as a whole."""


def validate(config: Any) -> Iterator[str]:
    """Yields a problem for each impossible value of `InitializationConfig`."""
    yield from too_small(config, ("init_method_std", "embedding_init_method_std"), 0)
