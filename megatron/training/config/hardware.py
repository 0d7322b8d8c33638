"""The machines of a run: what the launch checks and what a dry run predicts."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.declarations.config_fields import flag, too_small


@dataclass(kw_only=True, frozen=True)
class HardwareConfig:
    """GPUs, nodes and links. They change no result: they say which groups of ranks would be slow."""

    gpus_per_node: int | None = flag(None, from_checkpoint=False)
    """Number of GPUs, and ranks, of each node. Default: what the launcher says (LOCAL_WORLD_SIZE, or the variables of
    SLURM or MPI), or the GPUs that this process sees."""

    gpus_per_nvlink_domain: int | None = flag(None, from_checkpoint=False)
    """Number of GPUs that NVLink connects, such as 72 for GB200 NVL72. Tensor parallel groups beyond it are refused.
    Default: the GPUs of a node."""

    allow_tensor_parallel_across_nodes: bool = flag(
        False, from_checkpoint=False, only_with="tensor_model_parallel_size"
    )
    """Start although the ranks of a tensor parallel group are on several nodes, which exchange every layer's
    activations over the network."""

    gpu: str | None = flag(None, from_checkpoint=False, only_with="dry_run")
    """With --dry-run: predict the time of a step on this GPU (h100, h100-pcie, h200, a100-80gb, a100-40gb, b200,
    rtx-4090, l40s), or on that of a TOML file in the form of megatron/diagnosis/planning/gpus.toml."""

    link: str | None = flag(None, from_checkpoint=False, only_with=("dry_run", "gpu"))
    """With --gpu: rate at which each GPU sends to other nodes, such as 400Gb (bits) or 50GB (bytes) a second. Default:
    the rate of the GPU's usual network port."""

    plot: str | None = flag(None, from_checkpoint=False, only_with="dry_run")
    """Folder for memory.svg, a picture of the predicted memory of each kind of rank, and with --gpu step.svg, the
    predicted schedule of a step."""

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        yield from too_small(self, ("gpus_per_node", "gpus_per_nvlink_domain"), 1)
