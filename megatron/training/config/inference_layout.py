"""The flags that divide a model over ranks in tools that generate text."""

import os
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(kw_only=True, frozen=True)
class InferenceLayout:
    """How ranks divide the model. The checkpoint may come from a run with another layout."""

    tensor_model_parallel_size: int = 1
    """Number of ranks that divide each layer. Start the tool with torchrun; the result does not change."""

    pipeline_model_parallel_size: int = 1
    """Number of ranks that divide the layers."""

    expert_model_parallel_size: int = 1
    """Number of ranks that divide the experts of each layer. They compute the other layers more than once."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the layout needs."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.expert_model_parallel_size

    @property
    def words(self) -> list[str]:
        """The flags of a run with this layout."""
        sizes = {
            "--tensor-model-parallel-size": self.tensor_model_parallel_size,
            "--pipeline-model-parallel-size": self.pipeline_model_parallel_size,
            "--expert-model-parallel-size": self.expert_model_parallel_size,
        }
        words = [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]
        batch = self.num_ranks // self.tensor_model_parallel_size // self.pipeline_model_parallel_size
        return [*words, "--micro-batch-size", "1", "--global-batch-size", str(batch)] if words else []

    def validate(self) -> Iterator[str]:
        """Yields what is wrong with the sizes, and with the number of ranks that torchrun has started."""
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
        for name in names:
            if getattr(self, name) < 1:
                yield f"{{{name}}} must be at least 1"
        started = os.environ.get("WORLD_SIZE", "1")
        if min(getattr(self, name) for name in names) >= 1 and started.isdecimal() and int(started) != self.num_ranks:
            sizes = " x ".join(f"{{{name}}}" for name in names)
            yield (
                f"{sizes}: the layout needs {self.num_ranks} ranks, and {started} are started; start it with "
                f"torchrun --nproc_per_node {self.num_ranks}"
            )
