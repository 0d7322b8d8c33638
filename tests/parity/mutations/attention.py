"""Known bugs of latent attention and of model options that change attention."""

from parity.mutations.mutation import Mutation

_BLOCKS = "core/ops/attention/blocks.py"

LATENT = [
    Mutation(
        "latent-shared-key-not-summed",
        "the gradient of the rotary key that all heads of latent attention share comes from one rank's heads only",
        "core/transformer/multi_latent_attention.py",
        "copy_to_tensor_model_parallel_region(shared_key.contiguous(), self.tp_group)",
        "shared_key.contiguous()",
        "mla-packed/tp2/default",
    ),
    Mutation(
        "down-projection-not-summed",
        "under sequence parallelism the gradient of replicated matrices (such as the projections to latents) comes "
        "from a rank's own tokens only",
        "core/tensor_parallel/replicated.py",
        'frozenset({"tp"} if by_token else ())',
        "frozenset()",
        "mla-yarn/sp2/per-token",
    ),
]

MODEL_OPTIONS = [
    Mutation(
        "softcap-missing-in-ring",
        "ring attention does not apply the soft cap of attention scores",
        _BLOCKS,
        "if variant.cap is not None:",
        "if False:",
        "gemma/cp2-p2p/default",
    ),
    Mutation(
        "softcap-missing-in-gradient",
        "backward of attention in blocks treats capped scores as if they had no cap",
        _BLOCKS,
        "score_gradient if slope is None else score_gradient * slope",
        "score_gradient",
        "gemma/cp2-p2p/per-token",
    ),
    Mutation(
        "alibi-distance-in-the-block",
        "attention in blocks computes ALiBi distances from the start of each block instead of the sequence",
        _BLOCKS,
        "distance = (j + offsets.key_start) - (i + offsets.query_start)[:, None]",
        "distance = j - i[:, None]",
        "falcon/cp2-p2p/default",
    ),
    Mutation(
        "alibi-slopes-of-the-first-heads",
        "every tensor parallel rank uses the ALiBi slopes of the first heads",
        "core/ops/attention/unfused.py",
        "self.slopes[first_head : first_head + heads]",
        "self.slopes[:heads]",
        "falcon/tp2/per-token",
    ),
    Mutation(
        "full-width-norm-not-summed",
        "if tensor parallel ranks share a key head, the gradient of a norm over all heads is not summed over ranks",
        "core/transformer/query_key_norms.py",
        'facts = {"partial_gradient_axes": frozenset({"tp"})}',
        "facts = {}",
        "olmo/tp4/default",
    ),
]
