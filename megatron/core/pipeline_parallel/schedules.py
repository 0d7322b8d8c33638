"""`get_forward_backward_func` runs the micro-batches of a step. It is the public interface of `orders` and `runner`."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.action_lists import rank_actions
from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.chunk_hooks import device_of
from megatron.core.pipeline_parallel.orders import Schedule, schedule_name
from megatron.core.pipeline_parallel.p2p_communication import PipelineP2P, message_format_of
from megatron.core.pipeline_parallel.runner import ForwardStep, PipelineTask, Runner
from megatron.core.pipeline_parallel.stages import Pipeline, pipeline_of, states_into_stages
from megatron.core.timers import timed
from megatron.core.tokens import RngPosition
from megatron.core.utils.keywords import Keywords

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None) -> Callable[..., list[Any]]:
    """Returns the function that runs a step's micro-batches for a pipeline of this size (default: that of the default
    process groups).

    All three functions take the arguments of `forward_backward_no_pipelining`; config.pipeline_schedule selects the
    order.
    """
    ranks = pp_size if pp_size is not None else groups_or_default(None).size("pp")
    if (vp_size or 1) > 1:
        return forward_backward_pipelining_with_interleaving
    return forward_backward_pipelining_without_interleaving if ranks > 1 else forward_backward_no_pipelining


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any] | None] | None,
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
    rng_position_of: Callable[[int], RngPosition] | None = None,
    grad_scale_func: Callable[[Tensor], Tensor] | None = None,
    finalize_model_grads_func: Callable[..., Any] | None = None,
    timers: Callable[..., Any] | None = None,
    make_runner: Callable[..., Runner] = Runner,
) -> list[Any]:
    """Runs forward and backward of all micro-batches of a step; returns the report of each.

    `forward_step_func(data_iterator, model)` returns (output, loss_func). loss_func(output) returns

    - (loss, report): the micro-batch's mean loss; the step's loss is the mean over micro-batches;
    - (sum of losses, number of tokens, report): by default the mean over micro-batches of sum / number, with
      config.calculate_per_token_loss the sum, which `finalize_model_grads` divides by the tokens of the global batch.

    With `collect_non_loss_data` it is called as loss_func(output, non_loss_data=True), and its result is the report. If
    loss_func is None, the report is the output itself. Gradients are scaled by `grad_scale_func`, reduced with the
    last micro-batch only, and finished by `finalize_model_grads_func([model], tokens or None)`, unless
    `forward_only`.

    `timers` measure the whole call (level 1) and its parts. Functions and timers of these names in the config are used
    in place of the arguments.

    `rng_position_of(number)` returns the position in the run of a micro-batch, for random numbers (dropout, router
    noise). A model whose forward takes `micro_batch` is given it, with the scale of auxiliary losses and the
    micro-batch's turn, as one `MicroBatch`; `forward_step_func` need not pass it. Nothing here waits for the device.

    In a pipeline `model` and `data_iterator` are lists with one entry for each model chunk of this rank (each iterator
    yields all micro-batches), or single objects. A stage that is not the first gets its input by `set_input_tensor`
    before its forward step. Only the last stage calls loss functions; ranks without it return [].
    A message between stages has [seq_length / (context and sequence parallel ranks), micro_batch_size, hidden size]
    elements of config.pipeline_dtype; `adjust_tensor_shapes_fn([shape], [shape])` can change the shape. For an encoder
    and a decoder (config.num_encoder_layers) `seq_length` is the encoder's and `decoder_seq_length` the decoder's; the
    hidden states of both travel in one message.

    `make_runner(task, timers)` returns the object that executes the actions; `MicroBatchGraphs.runner` replays
    micro-batches as a CUDA graph.

    Raises UserError for arguments that do not fit the config or the process groups.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    config = config_of(chunks[0])
    groups = groups_or_default(pg_collection or getattr(chunks[0], "pg_collection", None))
    pipeline = pipeline_of_chunks(config, groups, len(chunks))
    iterators = _one_per_chunk(data_iterator, len(chunks))
    if p2p_communicator is not None:
        raise UserError("p2p_communicator: stages exchange through pg_collection.pp; leave it out")
    p2p = None
    if pipeline.pipeline_size > 1:
        message_format = message_format_of(
            config, groups, device_of(chunks), seq_length, micro_batch_size, decoder_seq_length
        )
        p2p = PipelineP2P(groups, pipeline, message_format.adjusted(adjust_tensor_shapes_fn))
    task = PipelineTask(
        forward_step_func,
        iterators,
        chunks,
        config,
        groups,
        pipeline,
        num_microbatches,
        p2p,
        collect_non_loss_data,
        rng_position_of,
        config.grad_scale_func or grad_scale_func,
        states_in=states_into_stages(config, pipeline),
    )
    timers = config.timers or timers
    runner = make_runner(task, timers)
    finalize = config.finalize_model_grads_func or finalize_model_grads_func
    with timed(timers, "forward-backward", 1, barrier=config.barrier_with_L1_time):
        if pipeline.num_stages == 1:
            runner.run([*one_after_the_other(num_microbatches, forward_only)])
        else:
            schedule = schedule_of(config, pipeline, num_microbatches, forward_only)
            runner.run(rank_actions(schedule, groups.rank("pp")))
        if not forward_only and finalize is not None:
            with timed(timers, "all-grads-sync", 1):
                _finalize(finalize, config, chunks, runner, pg_collection, force_all_reduce)
    return runner.losses.reports


def one_after_the_other(num_microbatches: int, forward_only: bool = False) -> Iterator[Action]:
    """Yields the step of a rank that has all layers: the loop over micro-batches. `Runner` executes each action; its
    FORWARD calls `forward_step_func` and the loss function."""
    for number in range(num_microbatches):
        yield Action(ActionKind.FORWARD, number)
        if forward_only:
            continue
        if number == num_microbatches - 1:
            yield Action(ActionKind.SYNC, number)  # the reduction of gradients starts during the last backward
        yield Action(ActionKind.BACKWARD, number)


def forward_backward_pipelining_without_interleaving(**arguments: Any) -> list[object]:
    """Runs a pipeline with one model chunk on each rank; see `forward_backward_no_pipelining`."""
    return forward_backward_no_pipelining(**arguments)


def forward_backward_pipelining_with_interleaving(**arguments: Any) -> list[object]:
    """Runs a pipeline with several model chunks on each rank; see `forward_backward_no_pipelining`."""
    return forward_backward_no_pipelining(**arguments)


def pipeline_of_chunks(config: "TransformerConfig", groups: ProcessGroupCollection, chunks: int) -> Pipeline:
    """Returns the assignment of stages to the ranks of these groups, with `chunks` model chunks on each rank. Raises
    UserError if the config describes another pipeline."""
    ranks = groups.size("pp")
    if ranks == 1 and chunks == 1:
        return Pipeline(1)
    pipeline = pipeline_of(config)
    if pipeline.pipeline_size != ranks:
        raise UserError(
            f"config.pipeline_model_parallel_size is {pipeline.pipeline_size}, the pipeline group has {ranks} ranks; "
            "make them equal"
        )
    if pipeline.chunks != chunks:
        raise UserError(f"model is a list of {chunks}, while the config says {pipeline.chunks} model chunks a rank")
    return pipeline


def schedule_of(
    config: "TransformerConfig", pipeline: Pipeline, num_microbatches: int, forward_only: bool = False
) -> Schedule:
    """Returns the schedule that a config asks for."""
    if pipeline.num_stages == 1:
        return Schedule("1f1b", pipeline, num_microbatches, forward_only)
    group = getattr(config, "microbatch_group_size_per_vp_stage", None)
    # With an unknown shape the receive waits when it is posted, so it is posted as late as possible.
    overlaps = config.overlap_p2p_comm and not config.variable_seq_lengths
    return Schedule(
        schedule_name(config.pipeline_schedule, pipeline),
        pipeline,
        num_microbatches,
        forward_only,
        group if pipeline.chunks > 1 and not pipeline.v_shaped else None,
        ahead=1 if overlaps else 0,
    )


def _finalize(
    function: Callable[..., Any],
    config: "TransformerConfig",
    chunks: list[nn.Module],
    runner: Runner,
    pg_collection: ProcessGroupCollection | None,
    force_all_reduce: bool | None,
) -> None:
    extra: dict[str, Any] = {}
    keywords = Keywords.of(function)
    if pg_collection is not None and "pg_collection" in keywords:
        extra["pg_collection"] = pg_collection
    if force_all_reduce and "force_all_reduce" in keywords:
        extra["force_all_reduce"] = force_all_reduce
    tokens: Tensor | None = None
    if config.calculate_per_token_loss:
        # Zero on ranks without the loss, so that the sum over the pipeline is the count, whichever rank has it.
        zero = torch.zeros((), dtype=torch.float64, device=device_of(chunks))
        tokens = zero if runner.losses.num_tokens is None else runner.losses.num_tokens
    function(chunks, tokens, **extra)


def _one_per_chunk(iterators: object, chunks: int) -> list[object]:
    if not isinstance(iterators, list | tuple):
        if iterators is not None and chunks > 1:
            raise UserError(
                f"data_iterator is a single one for {chunks} model chunks; each reads all micro-batches: give a list"
            )
        return [iterators] * chunks
    if len(iterators) != chunks:
        raise UserError(f"data_iterator is a list of {len(iterators)} for {chunks} model chunks; give one for each")
    return list(iterators)


def config_of(model: nn.Module) -> "TransformerConfig":
    """Returns the `config` of the model or of the module that it wraps. Raises UserError if there is none."""
    inner: Any = model
    while not hasattr(inner, "config"):
        inner = getattr(inner, "module", None)
        if inner is None:
            raise UserError(f"{type(model).__name__} has no attribute `config` (a TransformerConfig)")
    return inner.config
