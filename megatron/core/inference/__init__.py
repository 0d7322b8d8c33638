"""Text generation: the cache of keys and values, the choice of the next token, and the loop."""

from megatron.core.inference.sampling import SamplingParams
from megatron.core.inference.static_context import StaticInferenceContext

__all__ = ["SamplingParams", "StaticInferenceContext"]
