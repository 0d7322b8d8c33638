"""The files of a legacy checkpoint of Megatron-LM, one for each model parallel rank, and what a rank holds."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.conversion.model import RankTensor
from megatron.core.exceptions import UserError

FILE, FLAT_FILE = "model_optim_rng.pt", "distrib_optim.pt"
"""The files of a rank: its state dict, and its part of the state of a sharded optimizer."""
EXPERTS = ".experts.linear_"
"""Part of the names of tensors that hold the weights of several experts."""
_FOLDER = re.compile(r"mp_rank_(?P<tp>\d\d+)(?:_(?P<second>\d\d\d+))?(?:_(?P<third>\d\d\d+))?")


@dataclass(frozen=True)
class ModelLayout:
    """Sizes of the model parallel dimensions of a checkpoint, and the chunks of each pipeline rank."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    chunks: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the smallest run of this layout."""
        return self.tensor * self.pipeline * self.expert

    def rank(self, tensor: int, pipeline: int, expert: int) -> int:
        """Returns the rank at these places in the smallest run."""
        return tensor + self.tensor * (expert + self.expert * pipeline)


TensorsOf = Callable[[ModelLayout, int], list[list[RankTensor]]]
"""Returns the tensors of each model chunk of a rank of a layout, in the order of the module."""


def paths_by_place(folder: Path) -> dict[tuple[int, ...], Path]:
    """Returns the folders of the ranks by the numbers in their names. Raises UserError if there are none."""
    found = {}
    for path in sorted(folder.iterdir()):
        match = _FOLDER.fullmatch(path.name)
        if match is not None and (path / FILE).exists():
            found[tuple(int(number) for number in match.groups() if number is not None)] = path
    if not found:
        raise UserError(f"{folder} has no mp_rank_NN/{FILE}")
    return found
