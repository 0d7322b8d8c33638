"""Captures CUDA graphs of a run's micro-batches."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.exceptions import UserError
from megatron.core.health.rerun_state_machine import RerunStateMachine
from megatron.core.ops.fp8.linear import QuantizedWeights
from megatron.core.pipeline_parallel.captured_micro_batch import MicroBatchGraphs
from megatron.core.transformer.config.memory import captures_micro_batches
from megatron.core.transformer.layer_metrics import layer_metrics_of
from megatron.core.transformer.moe.router import token_counts_of
from megatron.core.utils.graph_capture import CudaGraphRecorder, GraphRecorder, TensorRecord
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import Environment
from megatron.training.log.finite import GradientProbe


def graph_recorder(device: torch.device) -> GraphRecorder | None:
    """Returns the recorder that captures graphs on a device; None on a CPU, which has no graphs."""
    return CudaGraphRecorder(device) if device.type == "cuda" else None


def capture_micro_batches(
    forward_backward: Callable[..., Any],
    config: PretrainConfig,
    environment: Environment,
    model: Sequence[nn.Module],
    probe: GradientProbe | None,
    results: RerunStateMachine | None,
) -> Callable[..., Any]:
    """Returns `forward_backward`, changed to run micro-batches as CUDA graphs if the flags ask for them and the device
    has them; otherwise unchanged."""
    recorder = graph_recorder(environment.device) if captures_micro_batches(config.transformer) else None
    if recorder is None:
        return forward_backward

    def before_capture(sentence: str) -> None:
        if results is not None and results.checks_results:
            raise UserError(
                "CUDA graphs: the loss function validates its results, which a replay would leave out; leave out the "
                "validation, --error-injection-rate or CUDA graphs"
            )
        if environment.is_first:
            print(sentence, flush=True)

    records: list[TensorRecord] = [*layer_metrics_of(model), *token_counts_of(model)]
    if probe is not None:
        records.append(probe)
    steps = config.transformer.cuda_graph_warmup_steps
    refresh = refresh_quantized_weights(model)
    graphs = MicroBatchGraphs(recorder, steps, records, before_capture, refresh)
    return functools.partial(forward_backward, make_runner=graphs.runner)


def refresh_quantized_weights(model: Sequence[nn.Module]) -> Callable[[], Hashable]:
    """Fixes the addresses of all quantised weights and scales of a model. Returns a function that updates them. That
    function returns which layers have scales of earlier steps, because the operations of a layer depend on that."""
    layers = [module for chunk in model for module in chunk.modules() if isinstance(module, QuantizedWeights)]
    for layer in layers:
        layer.fix_storage()
    return lambda: tuple(layer.refresh() for layer in layers)
