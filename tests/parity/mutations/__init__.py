"""Known bugs of parallel training, a file for each part of the product.

Each bug is a small change of one file. It does not change one process, all numbers stay finite and the loss falls.
`tests/parity/test_layouts.py::test_layout[caught_by]` catches it. docs/parity.md counts the bugs.
"""

from parity.mutations.attention import LATENT, MODEL_OPTIONS
from parity.mutations.bert import BERT
from parity.mutations.context import CONTEXT
from parity.mutations.data import DATA
from parity.mutations.experts import EXPERTS, ROUTERS
from parity.mutations.hybrids import HYBRIDS
from parity.mutations.mixers import MIXERS
from parity.mutations.mutation import Mutation
from parity.mutations.pipeline import PIPELINE
from parity.mutations.predicting import PREDICTING
from parity.mutations.t5 import T5
from parity.mutations.tensor import TENSOR

__all__ = ["MUTATIONS", "PARTS", "Mutation"]

PARTS = {
    "tensor and sequence parallelism": TENSOR,
    "pipelines": PIPELINE,
    "context parallelism": CONTEXT,
    "data parallelism and sharded state": DATA,
    "model options": MODEL_OPTIONS,
    "latent attention": LATENT,
    "routers": ROUTERS,
    "experts": EXPERTS,
    "multi-token prediction": PREDICTING,
    "delta nets and sparse attention": MIXERS,
    "hybrids and heterogeneous layers": HYBRIDS,
    "BERT": BERT,
    "T5": T5,
}
"""The bugs by what they break."""

MUTATIONS = [mutation for part in PARTS.values() for mutation in part]
