"""Initial weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.config_fields import not_a_flag, too_small


@dataclass(kw_only=True)
class InitializationConfig:
    """Distributions that initial weights are drawn from."""

    init_method: Callable[[Tensor], Any] | None = not_a_flag(None)
    """Fills a weight; Normal(init_method_std) when None."""

    output_layer_init_method: Callable[[Tensor], Any] | None = not_a_flag(None)
    """Fills the output projections of attention and MLP; Normal(init_method_std / sqrt(2 * layers)) when None."""

    init_method_std: float = 0.02
    """Standard deviation of initial weights."""

    embedding_init_method: Callable[[Tensor], Any] | None = not_a_flag(None)
    """Fills the embeddings; Normal(embedding_init_method_std) when None."""

    embedding_init_method_std: float | None = None
    """Standard deviation of initial embeddings; as --init-method-std when not given."""

    init_model_with_meta_device: bool = False
    """Build the model without memory; it gets that unit by unit as it is sharded: for models that no rank can hold."""


def validate(config: Any) -> Iterator[str]:
    """Yields a problem for each impossible value of `InitializationConfig`."""
    yield from too_small(config, ("init_method_std", "embedding_init_method_std"), 0)
