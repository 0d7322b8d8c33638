"""get_forward_backward_func: run the micro-batches of a step. The public face of orders and runner."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.orders import one_stage
from megatron.core.pipeline_parallel.runner import ForwardStep, Runner, Task, takes
from megatron.core.process_groups_config import ProcessGroupCollection, default_collection


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """The function that runs a step's micro-batches for a pipeline of this size (default: the default groups')."""
    stages = pp_size if pp_size is not None else default_collection().size("pp")
    if stages > 1 or (vp_size or 1) > 1:
        raise UserError(
            f"not yet: a pipeline of {stages} stages with {vp_size or 1} chunks each; one stage runs so far"
        )
    return forward_backward_no_pipelining


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    force_all_reduce: bool | None = False,
    p2p_communicator: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
    before_micro_batch: Callable[[int], None] | None = None,
) -> list[Any]:
    """Forward and backward of all micro-batches of a step on one stage; returns what each reported.

    `forward_step_func(data_iterator, model)` returns (output, loss_func). loss_func(output) returns

    - (loss, report): the micro-batch's mean loss; the step's loss is the mean over micro-batches;
    - (sum of losses, number of tokens, report): by default the mean over micro-batches of sum / number, with
      config.calculate_per_token_loss the sum, which `finalize_model_grads` divides by the tokens of the global batch.

    With `collect_non_loss_data` it is called as loss_func(output, non_loss_data=True) and what it returns is reported.
    A loss_func of None reports the output itself. Gradients are scaled by config.grad_scale_func, reduced with the last
    micro-batch only, and finished by config.finalize_model_grads_func([model], tokens or None), unless `forward_only`.

    `before_micro_batch(number)` is called ahead of each micro-batch: where dropout and data learn their place in the
    global batch. Shapes and the communicator matter to pipelines only. Nothing here waits for the device.
    """
    chunk = _only(model, "model")
    config = config_of(chunk)
    groups = pg_collection or getattr(chunk, "pg_collection", None) or default_collection()
    iterator = _only(data_iterator, "data_iterator")
    task = Task(
        forward_step_func,
        iterator,
        chunk,
        config,
        groups,
        num_microbatches,
        collect_non_loss_data,
        before_micro_batch,
    )
    runner = Runner(task)
    timed = config.timers("forward-backward", log_level=1) if config.timers is not None else None
    if timed is not None:
        timed.start(barrier=config.barrier_with_L1_time)
    runner.run(one_stage(num_microbatches, forward_only))
    if not forward_only and config.finalize_model_grads_func is not None:
        _finalize(config, chunk, runner, pg_collection, force_all_reduce)
    if timed is not None:
        timed.stop()
    return runner.reports


def _finalize(
    config: Any,
    chunk: nn.Module,
    runner: Runner,
    pg_collection: ProcessGroupCollection | None,
    force_all_reduce: bool | None,
) -> None:
    function = config.finalize_model_grads_func
    extra: dict[str, Any] = {}
    if pg_collection is not None and takes(function, "pg_collection"):
        extra["pg_collection"] = pg_collection
    if force_all_reduce and takes(function, "force_all_reduce"):
        extra["force_all_reduce"] = force_all_reduce
    function([chunk], runner.num_tokens if config.calculate_per_token_loss else None, **extra)


def _only(value: Any, name: str) -> Any:
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 1:
        raise UserError(f"{name} is a list of {len(value)}; without pipeline parallelism it has one entry")
    return value[0]


def config_of(model: nn.Module) -> Any:
    """The model's `config`, of the model itself or of what it wraps. Raises UserError where there is none."""
    inner: Any = model
    while not hasattr(inner, "config"):
        inner = getattr(inner, "module", None)
        if inner is None:
            raise UserError(f"{type(model).__name__} has no attribute `config` (a TransformerConfig)")
    return inner.config
