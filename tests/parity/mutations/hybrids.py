"""Known bugs of Mamba-2 layers and of layers that differ."""

from parity.mutations.mutation import Mutation

HYBRIDS = [
    Mutation(
        "state-crosses-documents",
        "when context parallel ranks exchange rows for heads, the borders of packed documents are lost, so that states "
        "pass from one document to the next",
        "core/transformer/mamba_mixer.py",
        "cu_seqlens=tokens.cu_seqlens)",
        "cu_seqlens=None)",
        "nemotron-h/cp2-p2p/per-token",
    ),
    Mutation(
        "parameters-of-other-groups",
        "each context parallel rank computes its groups of heads with the decays, convolutions and norm weights of the "
        "first rank's groups",
        "core/transformer/mamba_mixer.py",
        "parameter.chunk(group_size(self.cp_group))[group_rank(self.cp_group)]",
        "parameter.chunk(group_size(self.cp_group))[0]",
        "nemotron-h/cp2-p2p/per-token",
    ),
    Mutation(
        "replacement-not-summed",
        "under sequence parallelism each rank keeps its own tokens' gradient of a linear layer that replaces attention "
        "or an MLP",
        "core/transformer/mlp.py",
        "tp_group=tp_group if pg_collection is None else pg_collection.tp,",
        "tp_group=tp_group if pg_collection is None else pg_collection.tp, input_is_whole=True,",
        "nemotron-nas/sp2+pp2-auto/per-token",
    ),
]
