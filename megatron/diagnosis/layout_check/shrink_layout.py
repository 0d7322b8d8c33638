"""Shrinks the sizes of a layout: the same dimensions on as many processes as are allowed."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.pretrain_config import PretrainConfig


@dataclass
class LayoutSizes:
    """Number of ranks along each dimension of a layout."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    """The ranks of a stage are shared out a second time, for experts."""
    expert_tensor: int = 1

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert_data(self) -> int:
        """Number of ranks with the same experts."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    def __str__(self) -> str:
        split = f"tensor {self.tensor} x context {self.context} x pipeline {self.pipeline} x data {self.data}"
        if self.expert * self.expert_tensor == 1:
            return split
        return f"{split}, experts over {self.expert} x {self.expert_tensor} tensor"


def shrink_layout(config: PretrainConfig, processes: int) -> tuple[LayoutSizes, list[str]]:
    """Returns sizes of a layout for at most `processes` processes, and notes. Each dimension keeps at least two ranks
    (four for hierarchical context parallelism), as far as that is possible."""
    grid, transformer = config.grid, config.transformer
    asked = LayoutSizes(grid.tensor, grid.context, grid.pipeline, grid.data)
    sizes = LayoutSizes(asked.tensor, asked.context, asked.pipeline, asked.data)
    least = {"tensor": 2, "context": 4 if "a2a+p2p" in comm_types(transformer) else 2, "pipeline": 2, "data": 2}
    notes = []
    while sizes.ranks > processes:
        longer = [name for name in least if getattr(sizes, name) > least[name]]
        if longer:
            name = max(longer, key=lambda name: getattr(sizes, name))
            setattr(sizes, name, max(least[name], getattr(sizes, name) // 2))
            continue
        name = next(name for name in ("data", "context", "pipeline", "tensor") if getattr(sizes, name) > 1)
        notes.append(
            f"{name} parallelism is left out: {sizes.ranks} processes would be needed, {processes} are allowed "
            f"(--processes {sizes.ranks} takes it in)"
        )
        setattr(sizes, name, 1)
    if transformer.num_moe_experts is not None:
        asked.expert, asked.expert_tensor = grid.expert, grid.expert_tensor or grid.tensor
        notes += _share_experts_out(sizes, asked)
    if sizes != asked:
        notes.insert(0, f"layout: {sizes} instead of {asked}")
    return sizes, notes


def _share_experts_out(sizes: LayoutSizes, asked: LayoutSizes) -> list[str]:
    """Gives each dimension of the grid of experts two ranks, as far as the ranks of a stage suffice."""
    left, notes = sizes.tensor * sizes.context * sizes.data, []
    for name, wanted in (("expert_tensor", asked.expert_tensor), ("expert", asked.expert)):
        like_tensor = name == "expert_tensor" and wanted == asked.tensor
        size = sizes.tensor if like_tensor else min(2, wanted)
        if left % size:
            size = 1
            notes.append(f"{name.replace('_', ' ')} parallelism is left out: too few ranks are left")
        setattr(sizes, name, size)
        left //= size
    return notes


def comm_types(transformer: TransformerConfig) -> list[str]:
    """Returns how context parallel ranks exchange keys and values: one word for all layers, or one for each."""
    given = transformer.cp_comm_type
    return [given or "p2p"] if given is None or isinstance(given, str) else list(given)
