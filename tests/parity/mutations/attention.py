"""Known bugs of latent attention, and of model options that change single parts of attention."""

from parity.mutations.mutation import Mutation

_BLOCKS = "core/ops/attention/blocks.py"

LATENT = [
    Mutation(
        "shared-key-not-summed",
        "the part of the keys that all heads of latent attention share gets the gradient of one rank's heads",
        "core/transformer/multi_latent_attention.py",
        "copy_to_tensor_model_parallel_region(shared_key.contiguous(), self.tp_group)",
        "shared_key.contiguous()",
        "mla-packed/tp2/default",
        quick=True,
    ),
    Mutation(
        "whole-weight-not-summed",
        "under sequence parallelism weights that every rank holds whole, as those down to latents, get the gradient of "
        "its own tokens",
        "core/tensor_parallel/replicated.py",
        'frozenset({"tp"} if config.sequence_parallel else ())',
        "frozenset()",
        "mla-yarn/sp2/per-token",
    ),
]

MODEL_OPTIONS = [
    Mutation(
        "cap-missing-in-the-ring",
        "scores are bounded by one kernel and not by that of split rows",
        _BLOCKS,
        "if variant.cap is not None:",
        "if False:",
        "gemma/cp2-p2p/default",
    ),
    Mutation(
        "cap-missing-in-its-gradient",
        "there their gradient is that of scores without a bound",
        _BLOCKS,
        "score_gradient if slope is None else score_gradient * slope",
        "score_gradient",
        "gemma/cp2-all_gather/per-token",
    ),
    Mutation(
        "distances-in-the-block",
        "there ALiBi counts distances from the first key at hand",
        _BLOCKS,
        "distance = (j + offsets.key_start) - (i + offsets.query_start)[:, None]",
        "distance = j - i[:, None]",
        "falcon/cp2-p2p/default",
    ),
    Mutation(
        "rates-of-the-first-heads",
        "every tensor parallel rank has the ALiBi rates of the first heads",
        "core/ops/attention/unfused.py",
        "self.slopes[first_head : first_head + heads]",
        "self.slopes[:heads]",
        "falcon/tp2/per-token",
    ),
    Mutation(
        "norm-of-all-heads-not-summed",
        "where ranks share a head of keys, a norm over all heads gets the gradient of a rank's own queries",
        "core/transformer/query_key_norms.py",
        'facts = {"partial_gradient_axes": frozenset({"tp"})}',
        "facts = {}",
        "olmo/tp4/default",
    ),
]
