"""Options of text generation."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag, not_a_flag

_TRAINING = "it concerns generation, not training"


@dataclass(kw_only=True)
class InferenceConfig:
    """Options of decoding. They have no effect on training."""

    flash_decode: bool = flag(False, no_effect=_TRAINING)
    """Decode with a kernel for a single query."""

    inference_rng_tracker: bool = flag(False, no_effect=_TRAINING)
    """Keep random states so that generation works under CUDA graphs."""

    inference_sampling_seed: int = not_a_flag(42)
    """Seed for sampling tokens."""

    symmetric_ar_type: Literal["two_shot", "one_shot", "multimem_all_reduce"] | None = flag(None, no_effect=_TRAINING)
    """All-reduce algorithm over symmetric memory when decoding."""

    use_inference_optimized_layers: bool = not_a_flag(False)
    """Use layers made for decoding only."""

    inference_fuse_tp_communication: bool = flag(False, no_effect=_TRAINING)
    """Fuse communication, residual and norm when decoding."""

    mlp_chunks_for_prefill: int = flag(1, no_effect=_TRAINING)
    """Number of chunks of the prompt that the MLP processes one by one."""
