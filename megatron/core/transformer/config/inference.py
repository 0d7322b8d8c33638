"""What only generation looks at."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_a_flag

_TRAINING = "it concerns generation, not training"


@dataclass(kw_only=True)
class InferenceConfig:
    """Decoding."""

    flash_decode: bool = flag(False, no_effect=_TRAINING)
    """Decode with a kernel made for one query."""

    inference_rng_tracker: bool = flag(False, no_effect=_TRAINING)
    """Random states for generation under CUDA graphs."""

    inference_sampling_seed: int = not_a_flag(42)
    """Seed of sampled tokens."""

    symmetric_ar_type: Literal["two_shot", "one_shot", "multimem_all_reduce"] | None = flag(None, no_effect=_TRAINING)
    """All-reduce over symmetric memory when decoding."""

    use_inference_optimized_layers: bool = not_a_flag(False)
    """Layers for decoding only."""

    inference_fuse_tp_communication: bool = flag(False, no_effect=_TRAINING)
    """Fuse communication, residual and norm when decoding."""

    mlp_chunks_for_prefill: int = flag(1, no_effect=_TRAINING)
    """Pieces of the prompt that the MLP takes one by one."""
