"""--distributed-timeout-seconds-after-init: changes the time limit of collectives after the first step."""

from datetime import timedelta

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.training.hooks.hook import Hook


class GroupTimeout(Hook):
    """Sets the time limit after the first step. The first step takes longer, because kernels are compiled and
    communicators are made in it."""

    def __init__(self, groups: ProcessGroupCollection, seconds: int) -> None:
        self.groups = groups
        self.seconds = seconds
        self._is_set = False

    def after_step(self, iteration: int) -> None:
        """Sets the limit of all groups, once."""
        if not self._is_set:
            self.groups.set_timeout(timedelta(seconds=self.seconds))
            self._is_set = True
