"""Builds the hooks that the flags ask for."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel
from megatron.training.config.log import KINDS
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.hooks.fault_injector import FaultInjector
from megatron.training.hooks.gc import ManualGarbageCollection
from megatron.training.hooks.group_timeout import GroupTimeout
from megatron.training.hooks.hardware import ReplicaCheck, RerunReport, StragglerReport
from megatron.training.hooks.hook import Hook
from megatron.training.hooks.preemption import PreemptionNotice
from megatron.training.hooks.profiler import make_memory_history, make_profiler
from megatron.training.hooks.progress_file import ProgressFile
from megatron.training.hooks.routing_trace import RoutingTrace
from megatron.training.hooks.sniff_test import SniffTest
from megatron.training.hooks.step_tensors import StepTensors
from megatron.training.launch.environment import Environment
from megatron.training.state import TrainState


def build_hooks(
    config: PretrainConfig, environment: Environment, state: TrainState, model: Sequence[DistributedDataParallel] = ()
) -> list[Hook]:
    """Returns the hooks that the flags ask for."""
    training, logging, resilience = config.training, config.logging, config.resilience
    hooks: list[Hook] = []
    if training.manual_gc:
        hooks.append(ManualGarbageCollection(training.manual_gc_interval, training.manual_gc_eval))
    timeout = config.parallel.distributed_timeout_seconds_after_init
    if timeout is not None:
        hooks.append(GroupTimeout(environment.groups, timeout))
    if resilience.check_weight_hash_across_dp_replicas_interval is not None:
        hooks.append(ReplicaCheck(model, resilience.check_weight_hash_across_dp_replicas_interval))
    if resilience.gpu_sniff_test_interval is not None:
        world = dist.group.WORLD if dist.is_initialized() else None
        hooks.append(SniffTest(resilience.gpu_sniff_test_interval, world, environment.device))
    if resilience.preemption_notice is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        hooks.append(PreemptionNotice(resilience.preemption_notice, resilience.exit_signal))
    if config.fault_injector.faults:
        hooks.append(FaultInjector(config.fault_injector, environment.rank, environment.world_size, config.seed))
    if config.records.moe_routing_trace_path is not None:
        hooks.append(RoutingTrace(config.records, model, environment.rank))
    intervals = {kind: every for kind in KINDS if (every := config.records.interval(kind)) is not None}
    if intervals and config.checkpoint.save is not None:
        hooks.append(StepTensors(Path(config.checkpoint.save), model, environment.groups, intervals))
    if resilience.rerun_mode == "report_stats":
        hooks.append(RerunReport())
    if logging.log_straggler:
        hooks.append(StragglerReport(logging.log_interval))
    if logging.log_progress and environment.is_first and config.checkpoint.save is not None:
        hooks.append(ProgressFile(config.checkpoint.save, state, environment.world_size))
    return [*hooks, *_profiling_hooks(config, environment.rank)]


def _profiling_hooks(config: PretrainConfig, rank: int) -> list[Hook]:
    flags = config.logging
    history = profiler = None
    if flags.record_memory_history:
        history = make_memory_history(flags.memory_snapshot_path, rank, flags.profile_ranks, flags.log_interval)
    if flags.profile:
        profiler = make_profiler(flags, rank, flags.tensorboard_dir or config.checkpoint.save)
    return [hook for hook in (history, profiler) if hook is not None]
