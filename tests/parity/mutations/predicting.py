"""Known bugs of multi-token prediction."""

from parity.mutations.mutation import Mutation

PREDICTING = [
    Mutation(
        "no-tokens-from-other-ranks",
        "multi-token prediction does not get the next tokens that other context parallel ranks hold",
        "core/context_parallel/mtp_shift.py",
        "return torch.stack(following, 2)",
        "return torch.zeros_like(torch.stack(following, 2))",
        "mtp-learned/cp2-p2p/default",
    ),
    Mutation(
        "document-ends-by-local-position",
        "multi-token prediction looks up the end of a document by the token's local position on its rank",
        "core/context_parallel/mtp_shift.py",
        "    ends = tokens.cu_seqlens[1:].to(torch.int64)",
        "    ends, index = tokens.cu_seqlens[1:].to(torch.int64), torch.arange(tokens.seq_length, device=device)",
        "mtp-packed/cp2-p2p/default",
    ),
    Mutation(
        "prediction-loss-divided-by-local-tokens",
        "the multi-token prediction loss is divided by the tokens of one context parallel rank",
        "core/models/common/predictions.py",
        "all_reduce(torch.stack([mask.sum(dtype=torch.float64) for mask in masks]), cp_group)",
        "torch.stack([mask.sum(dtype=torch.float64) for mask in masks])",
        "mtp-learned/cp2-a2a/default",
    ),
    Mutation(
        "third-embedding-copy-not-summed",
        "the gradient of the embedding copy of the multi-token prediction layers is not summed with the others",
        "core/models/gpt/gpt_model.py",
        "tied=positions_tied or (shares and not post_process),",
        "tied=not positions_tied and shares and not post_process,",
        "mtp-learned/pp2/default",
    ),
]
