"""Replays the optimizer's step as a CUDA graph."""

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepUpdate
from megatron.core.utils.graph_capture import CapturedGraph, GraphRecorder, map_tensors


class CapturedUpdate:
    """`step_on_device` of an optimizer: gradient norm, clipping and update, as a graph after some eager steps.

    Learning rate, number of updates and loss scale are tensors on the device that keep their addresses, so a replay
    reads their current values. Weight decay is a number; when it changes, the step is captured again. Raises UserError
    for sharded state, whose update communicates, and for other optimizers than FlatOptimizer.
    """

    def __init__(self, optimizer: MegatronOptimizer, recorder: GraphRecorder, warmup_steps: int) -> None:
        if not isinstance(optimizer, FlatOptimizer):
            raise UserError(
                f"--optimizer-cuda-graph: {type(optimizer).__name__} is not the optimizer of the flags; leave it out"
            )
        several = [axis for axis in ("dp_cp", "mp") if optimizer.groups.size(axis) > 1]
        if several:
            raise UserError("--optimizer-cuda-graph: the update communicates between ranks; it needs a single one")
        if optimizer.config.optimizer_cpu_offload:
            raise UserError("--optimizer-cuda-graph: a graph keeps the state on the device; drop optimizer_cpu_offload")
        self.optimizer, self.recorder, self.warmup_steps = optimizer, recorder, warmup_steps
        self._loss_is_finite = torch.ones((), dtype=torch.bool, device=optimizer.device)
        self._steps = 0
        self._settings: list[tuple[int, float]] = []
        self._graph: CapturedGraph[StepUpdate] | None = None

    def __call__(self, loss_is_finite: Tensor) -> StepUpdate:
        """Updates the weights; see `MegatronOptimizer.step_on_device`."""
        self._steps += 1
        self._loss_is_finite.copy_(loss_is_finite)
        if self._steps <= self.warmup_steps:
            return self.recorder.warm_up(self._update)
        settings = [self._setting(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        if self._graph is None or settings != self._settings:
            self._graph, self._settings = self.recorder.capture(self._update), settings
        self._graph.replay()
        for chunk in self.optimizer.chunks:
            chunk.start_param_sync()  # its part on the host, which a replay does not run
        return map_tensors(torch.clone, self._graph.outputs)

    def _update(self) -> StepUpdate:
        return self.optimizer.step_on_device(self._loss_is_finite)

    def _setting(self, rate: Tensor | float, weight_decay: Tensor | float) -> tuple[int, float]:
        if not isinstance(rate, Tensor) or isinstance(weight_decay, Tensor):
            raise UserError(
                "--optimizer-cuda-graph: a group of parameters has a learning rate that is no tensor, or a weight "
                "decay that changes in every step; leave it out"
            )
        return rate.data_ptr(), float(weight_decay)
