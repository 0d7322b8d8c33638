"""Known bugs of layouts, a file for each part of the product: each a change of one line, and the test that catches it.

Each leaves one process right, keeps everything finite and lets the loss fall. `caught_by` is a cell: the test
`tests/parity/test_layouts.py::test_layout[caught_by]`. docs/parity.md has the table, which a test keeps true.
"""

from parity.mutations.attention import LATENT, MODEL_OPTIONS
from parity.mutations.context import CONTEXT
from parity.mutations.data import DATA
from parity.mutations.experts import EXPERTS, ROUTERS
from parity.mutations.mutation import Mutation
from parity.mutations.pipeline import PIPELINE
from parity.mutations.predicting import PREDICTING
from parity.mutations.tensor import TENSOR

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS = [*TENSOR, *PIPELINE, *CONTEXT, *DATA, *MODEL_OPTIONS, *LATENT, *ROUTERS, *EXPERTS, *PREDICTING]
