"""--check-weight-hash-across-dp-replicas-interval: ends the run if data parallel replicas hold different weights."""

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.replica_check import differing_units
from megatron.training.hooks.hook import Hook


class ReplicaCheck(Hook):
    """Compares checksums of the weights after every `interval`-th step. The comparison waits for the device.

    Raises RuntimeError on each rank of the data parallel group; the error names the weights that differ, and the
    replicas.
    """

    def __init__(self, model: Sequence[DistributedDataParallel], interval: int) -> None:
        self.model = model
        self.interval = interval

    def after_step(self, iteration: int) -> None:
        """Compares the replicas if the interval divides the iteration."""
        if iteration % self.interval:
            return
        found = differing_units(self.model)
        if found:
            more = f" and of {len(found) - 1} more units" if len(found) > 1 else ""
            replicas = ", ".join(map(str, found[0].replicas))
            raise RuntimeError(
                f"after iteration {iteration} the weights of {found[0].unit}{more} differ between data parallel "
                f"replicas: replica {replicas} from most others; the hardware of its rank may be broken"
            )
