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
        quick=True,
    ),
]
