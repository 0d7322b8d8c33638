"""Known bugs of token mixers other than attention."""

from parity.mutations.mutation import Mutation

MIXERS = [
    Mutation(
        "delta-norm-not-summed",
        "the gradient of the norm that all heads of a gated delta net share comes from one rank's heads only",
        "core/transformer/gated_delta_net.py",
        'if groups.size("tp") > 1:  # each rank norms its own heads',
        "if False:",
        "delta/tp2/default",
    ),
    Mutation(
        "decays-of-other-heads",
        "each context parallel rank computes its heads of a gated delta net with the decays and convolutions of the "
        "first rank's heads",
        "core/transformer/gated_delta_net.py",
        "parameter.chunk(group_size(self.cp_group))[group_rank(self.cp_group)]",
        "parameter.chunk(group_size(self.cp_group))[0]",
        "delta-packed/cp2-p2p/default",
    ),
    Mutation(
        "indexer-of-own-heads",
        "a tensor parallel rank trains its copy of the indexer with the attention of its own heads only",
        "core/ops/attention/indexer.py",
        "summed = all_reduce(scores.softmax(-1).sum(1), tp_group)",
        "summed = scores.softmax(-1).sum(1)",
        "dsa/tp2/per-token",
    ),
    Mutation(
        "indexer-loss-per-rank-of-tokens",
        "under sequence parallelism the gradients of the indexer, which all ranks compute for all tokens, are summed",
        "core/transformer/sparse_latent_attention.py",
        '"input_is_whole": True}',
        '"input_is_whole": False}',
        "dsa/sp2/default",
    ),
    Mutation(
        "queries-of-another-part",
        "each context parallel rank selects keys as if its queries stood where those of the first rank do",
        "core/transformer/sparse_latent_attention.py",
        "places = row_index(inputs.tokens, device)[None]",
        "places = row_index(inputs.tokens, device, 0)[None]",
        "dsa-packed/cp2-p2p/per-token",
    ),
    Mutation(
        "indexer-keys-of-other-ranks",
        "a context parallel rank's loss does not train the indexer's keys, which other ranks computed",
        "core/transformer/sparse_latent_attention.py",
        "gather_whole_rows(rows, self.cp_group, self.cp_size)",
        "gather_whole_rows(rows.detach(), self.cp_group, self.cp_size)",
        "dsa/cp2-p2p/per-token",
    ),
    Mutation(
        "indexer-loss-per-part",
        "each context parallel rank adds the mean loss of the indexer over its part as if it had the whole row",
        "core/transformer/sparse_latent_attention.py",
        "summed / (count * self.cp_size)",
        "summed / count",
        "dsa/cp2-p2p/default",
    ),
]
