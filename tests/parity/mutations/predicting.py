"""Known bugs of what predicts tokens further ahead."""

from parity.mutations.mutation import Mutation

PREDICTING = [
    Mutation(
        "ahead-within-the-part",
        "tokens further on are looked for among those that a context parallel rank has",
        "core/context_parallel/mtp_shift.py",
        "return torch.stack(following, 2)",
        "return torch.zeros_like(torch.stack(following, 2))",
        "mtp-learned/cp2-p2p/default",
        quick=True,
    ),
    Mutation(
        "ahead-across-documents",
        "where documents end is looked up by the place of a token among a rank's own",
        "core/context_parallel/mtp_shift.py",
        "    ends = tokens.cu_seqlens[1:].to(torch.int64)",
        "    ends, index = tokens.cu_seqlens[1:].to(torch.int64), torch.arange(tokens.seq_length, device=device)",
        "mtp-packed/cp2-p2p/default",
    ),
    Mutation(
        "predictions-by-local-tokens",
        "the loss of tokens further on is divided by a context parallel rank's own",
        "core/models/common/predictions.py",
        "all_reduce(torch.stack([mask.sum(dtype=torch.float64) for mask in masks]), cp_group)",
        "torch.stack([mask.sum(dtype=torch.float64) for mask in masks])",
        "mtp-learned/cp2-a2a/default",
    ),
    Mutation(
        "third-copy-not-summed",
        "the copy of the embedding beside the layers that predict further on keeps a gradient of its own",
        "core/models/gpt/gpt_model.py",
        "tied=positions_tied or (shares and not post_process),",
        "tied=not positions_tied and shares and not post_process,",
        "mtp-learned/pp2/default",
    ),
]
