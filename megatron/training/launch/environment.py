"""The processes of a run: rank, device and process groups of this process.

`process_environment` is a context manager, so that a run can be set up and closed twice in one process, with other
sizes.
"""

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import default_for_now
from megatron.core.groups.process_groups_config import GROUPS_WITH_SETTINGS, ProcessGroupCollection
from megatron.core.pipeline_parallel.stages import Pipeline, decoder_ranks, embedding_ranks, encoder_ranks, pipeline_of
from megatron.core.utils.communicator_settings import read_communicator_settings
from megatron.core.utils.rendezvous import local_device, start_torch_distributed
from megatron.core.utils.world_store import StartFailed
from megatron.launcher import end_with_launcher
from megatron.siblings import notice_siblings, stop_noticing
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.errors import delay_errors_on_other_ranks, end_process_at_exit, write_launcher_error_file
from megatron.training.launch.heartbeat import Heartbeat, Progress
from megatron.training.launch.same_inputs import check_same_flags
from megatron.training.launch.signals import leave_error_alone
from megatron.training.launch.watch import Limits

_BEFORE_COLLECTIVES_TIME_OUT = 0.9
"""By default a run without progress ends after this fraction of the timeout of collectives."""
_MOST_OPEN_FILES = 1 << 16
"""Highest limit of open files that is asked for: some programs walk through all numbers up to the limit."""


class Publication:
    """Is told of a run, for code that the run does not hand its parts to: Megatron-LM's functions for scripts
    (`get_args()`, `get_num_microbatches()`, `parallel_state`) act on the current run. This class tells nobody;
    `megatron.facades.global_vars` has the one that keeps what it is told. A `context` is a `providers.Context`."""

    @contextlib.contextmanager
    def stages(self, pipeline: Pipeline) -> Iterator[None]:
        """Inside the context, these are the pipeline stages of the current run."""
        yield

    @contextlib.contextmanager
    def run_for_now(self, context: Any, **facts: Any) -> Iterator[None]:
        """Inside the context, this is the current run. At the end the one before is, if there was one."""
        yield

    def begin(self, context: Any, **facts: Any) -> None:
        """Makes this the current run. `facts` are further values that scripts may read."""

    def set_schedule(self, schedule: BatchSchedule) -> None:
        """Tells the batch sizes of the current run."""

    def set_writers(self, tensorboard: Any, wandb: Any) -> None:
        """Tells the writers of the log."""


@dataclass(frozen=True)
class Environment:
    """This process and its place among the processes of the run."""

    rank: int
    world_size: int
    device: torch.device
    groups: ProcessGroupCollection
    loss_stage: int | None = None
    """Pipeline rank that computes the loss; None: the last."""
    progress: Progress = field(default_factory=Progress, compare=False)
    """Phase and iteration of the run."""
    heartbeat: Heartbeat | None = field(default=None, compare=False)
    """Finds ranks that fail; None in a run of one process, and in a process group that existed before the run."""
    publication: Publication = field(default_factory=Publication, compare=False)
    """Is told of the run, for code that is not handed it."""

    @property
    def is_first(self) -> bool:
        """Whether this process prints lines that are the same on all ranks."""
        return self.rank == 0

    @property
    def has_loss(self) -> bool:
        """Whether this process computes the losses of its samples."""
        return self.groups.rank("pp") == self._loss_stage

    @property
    def logs(self) -> bool:
        """Whether this process prints the log line: the last of the ranks that compute losses."""
        grid = self.groups.grid
        assert grid is not None
        in_this_pipeline = self.groups.ranks("pp")[self._loss_stage]
        return self.rank == max(grid.group(in_this_pipeline, ("tp", "cp", "dp")))

    @property
    def _loss_stage(self) -> int:
        return self.groups.size("pp") - 1 if self.loss_stage is None else self.loss_stage


@contextlib.contextmanager
def process_environment(
    config: PretrainConfig, alone: bool = False, publication: Publication | None = None
) -> Iterator[Environment]:
    """Joins the run that torchrun started, or makes a run of one process without torchrun; leaves it at the end. With
    `alone`, torch.distributed is initialised for one process too.

    --distributed-backend moves the device's tensors (nccl or gloo); host tensors always use gloo.

    Inside the context the groups are the default of user scripts, and `publication` knows the stages. A process group
    that exists already (a user's or a test's) is used and left as it is. Raises UserError if ranks were started with
    different flags, and if the number of processes is not that of the config's grid. Prints a sentence and raises
    SystemExit if the ranks do not find each other.
    """
    end_with_launcher()
    notice_siblings()
    raise_open_file_limit()
    device = local_device()
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    backend = config.parallel.distributed_backend or "nccl"
    watched, progress = _Watched(config), Progress()
    mine = False
    try:
        mine = not dist.is_initialized() and _join(
            lambda: start_torch_distributed(
                device, timeout, backend, alone, lambda store, rank, size: watched.start(store, rank, size, progress)
            ),
            watched,
        )
        stop_noticing()
        heartbeat = watched.heartbeat
        _check_same_flags_first(config, heartbeat)
        planned, started = config.grid.world_size, dist.get_world_size() if dist.is_initialized() else 1
        if started != planned:
            raise UserError(f"WORLD_SIZE is {planned}, but torch.distributed has {started} ranks; make them equal")
        rank = dist.get_rank() if dist.is_initialized() else 0
        groups, pipeline = groups_of_rank(config, rank, timeout), pipeline_of(config.transformer)
        publication = publication or Publication()
        with default_groups(groups, pipeline, publication):
            yield Environment(rank, started, device, groups, pipeline.loss_rank, progress, heartbeat, publication)
        if heartbeat is not None:
            heartbeat.finish()
    except BaseException as error:
        if watched.heartbeat is not None:
            _end_with_the_others(error, watched.heartbeat)
        elif mine and dist.is_initialized() and dist.get_world_size() > 1:
            end_process_at_exit(error)
        raise
    finally:
        if mine and dist.is_initialized():
            dist.destroy_process_group()


class _Watched:
    """Starts the heartbeat of this process once its rank is known."""

    def __init__(self, config: PretrainConfig) -> None:
        minutes = config.parallel.distributed_timeout_minutes
        self.hang = config.resilience.hang_timeout_seconds or _BEFORE_COLLECTIVES_TIME_OUT * 60 * minutes
        self.heartbeat: Heartbeat | None = None

    def start(self, store: dist.Store, rank: int, size: int, progress: Progress) -> None:
        host = os.environ["MASTER_ADDR"]
        try:
            self.heartbeat = Heartbeat(store, rank, size, host, progress, Limits(hang=self.hang))
        except OSError as error:
            print(
                f"rank {rank}: no connection to the heartbeat of rank 0 on {host}: {error}; a failed rank is noticed "
                "only by --distributed-timeout-minutes",
                file=sys.stderr,
                flush=True,
            )
        except dist.DistError as error:
            raise StartFailed(
                f"rank {rank} of {size} lost the store of the run in start: the process that serves it, rank 0 or the "
                f"torchrun of node 0, has ended ({str(error).splitlines()[0]})"
            ) from None


def _join(start: Callable[[], bool], watched: _Watched) -> bool:
    """Calls `start`, which joins the other ranks. If they do not find each other, prints why, and raises SystemExit.
    The ranks print a mistake in torchrun's variables once."""
    try:
        return start()
    except UserError:
        delay_errors_on_other_ranks()
        raise
    except StartFailed as error:
        if watched.heartbeat is not None:
            watched.heartbeat.report(error)
        if watched.heartbeat is None or watched.heartbeat.wait_for_cause() is None:
            text = f"the run ends: {error}"
            print(text, file=sys.stderr, flush=True)
            write_launcher_error_file(text)
        raise SystemExit(1) from None


def _end_with_the_others(error: BaseException, heartbeat: Heartbeat) -> None:
    """Reports the error that ends this process, and waits until the message about the end of the run is out. Raises
    SystemExit if the error follows from the failure of another rank, or if the script left the run with code 0."""
    leave_error_alone()
    heartbeat.report(error)
    heartbeat.wait_for_cause()
    consequence = heartbeat.is_consequence()
    if consequence or (isinstance(error, SystemExit) and not error.code):
        code = heartbeat.cause["code"] if consequence and heartbeat.cause is not None else 1
        end_process_at_exit(SystemExit(code))
        raise SystemExit(code) from None
    end_process_at_exit(error)


def _check_same_flags_first(config: PretrainConfig, heartbeat: Heartbeat | None) -> None:
    """Checks that ranks agree before groups are made: ranks with different sizes would make different groups and wait
    forever."""
    try:
        check_same_flags(config)
    except UserError as error:
        if heartbeat is not None:
            heartbeat.report(error)
        delay_errors_on_other_ranks()
        raise


def groups_of_rank(
    config: PretrainConfig, rank: int, timeout: timedelta | None = None, planned: bool = False
) -> ProcessGroupCollection:
    """Returns the process groups of one rank of the run. The layout of the stages decides which ranks of a pipeline
    hold the word embedding or the head, and so share the group `embd`: in a V-shaped pipeline one rank holds both.
    Stages with multi-token prediction layers hold copies of both embeddings, and so does the first stage of the decoder
    of an encoder-decoder model. `planned` groups only know their ranks."""
    transformer = config.transformer
    # Without such copies Megatron-LM's group has the rank of the head even if the weights are not tied.
    copied = transformer.mtp_num_layers or transformer.num_encoder_layers
    shared = not (copied and config.model.untie_embeddings_and_output_weights)
    holders = embedding_ranks(transformer, shared_with_head=shared)
    position_holders = embedding_ranks(transformer, shared_with_head=False)
    readers, writers = encoder_ranks(transformer), decoder_ranks(transformer)
    sizes = config.transformer.hierarchical_context_parallel_sizes
    path = config.parallel.nccl_communicator_config_path
    return ProcessGroupCollection.from_grid(
        config.grid,
        rank,
        hierarchical_context_sizes=sizes if config.grid.context > 1 else None,
        embedding_ranks=lambda ranks: [ranks[place] for place in holders],
        position_embedding_ranks=lambda ranks: [ranks[place] for place in position_holders],
        encoder_ranks=lambda ranks: [ranks[place] for place in readers],
        decoder_ranks=lambda ranks: [ranks[place] for place in writers],
        timeout=timeout,
        nccl_settings=None if path is None else read_communicator_settings(path, GROUPS_WITH_SETTINGS),
        planned=planned,
    )


@contextlib.contextmanager
def default_groups(
    groups: ProcessGroupCollection, pipeline: Pipeline, publication: Publication | None = None
) -> Iterator[None]:
    """Inside the context, these groups and stages are the default of user scripts: the functions of parallel_state use
    them, and public constructors that are called without groups."""
    with default_for_now(groups), (publication or Publication()).stages(pipeline):
        yield


def raise_open_file_limit() -> None:
    """Raises this process's soft limit of open files (ulimit -n) to the hard one, up to 65536. Child processes inherit
    it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some containers and macOS refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
