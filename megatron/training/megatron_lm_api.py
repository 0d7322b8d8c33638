"""Published functions for scripts with a loop of their own. They take no config: they speak of the run that
`initialize_megatron` began, or that `pretrain` set up last.

    initialize_megatron()
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, ModelType.encoder_or_decoder)
    train, valid, test = build_train_valid_test_data_iterators(datasets_provider)
    run_step = get_forward_backward_func()
    loss, *_ = train_step(forward_step, train, model, optimizer, scheduler, model[0].config, run_step)

Unlike our own loop, `train_step` waits for the device. (`megatron.training.train_step`; the function of that name in
megatron.training.training is our loop's.)
"""

import atexit
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.collectives import all_reduce
from megatron.core.enums import ModelType
from megatron.core.exceptions import UserError
from megatron.core.num_microbatches_calculator import (
    BatchSchedule,
    get_current_running_global_batch_size,
    get_micro_batch_size,
    get_num_microbatches,
    update_num_microbatches,
    use_schedule,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.chunk_hooks import takes
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import global_vars
from megatron.training.arguments import Arguments, config_of_command_line, validate_args
from megatron.training.checkpointing import Checkpoints
from megatron.training.data.splits import build_splits, step_data
from megatron.training.data.step_data import set_rng_position, step_data_of
from megatron.training.evaluate import evaluate as run_evaluation
from megatron.training.initialize import process_environment
from megatron.training.lr_schedule import build_scheduler
from megatron.training.providers import Context, providers_of_user_script, stages_of_rank, warn_unused
from megatron.training.setup import (
    build_model,
    build_optimizer,
    connect,
    resolve_vocabulary_and_stages,
    sample_counts,
    set_torch,
)
from megatron.training.state import TrainState
from megatron.training.tokenizer.build import build_tokenizer

_begun = contextlib.ExitStack()
atexit.register(_begun.close)


def initialize_megatron(
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = False,
    skip_mpu_initialization: bool = False,
    get_embedding_ranks: Callable[..., Any] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    parsed_args: Arguments | None = None,
    store: Any = None,
) -> None:
    """Read the command line, join the other ranks, make groups and tokenizer: `get_args()` and its like work then.

    The process group ends with the program. A machine without CUDA is always allowed. Calling it again begins another
    run. Exits with code 2 when the command line is wrong; raises UserError for what there is not yet.
    """
    asked = {"skip_mpu_initialization": skip_mpu_initialization, "store": store is not None}
    refuse("initialize_megatron", asked)
    chosen = {"get_embedding_ranks": get_embedding_ranks, "get_position_embedding_ranks": get_position_embedding_ranks}
    warn_unused("initialize_megatron", chosen)
    if parsed_args is None:
        config = config_of_command_line(extra_args_provider, args_defaults, ignore_unknown_args)
    else:
        config = parsed_args.config or validate_args(parsed_args, args_defaults).config
    _begun.close()
    environment = _begun.enter_context(process_environment(config))
    set_torch(config)
    tokenizer = build_tokenizer(config.tokenizer)
    padded, found = resolve_vocabulary_and_stages(config, tokenizer)
    for line in (*config.notes, *found) if environment.is_first else ():
        print(line, flush=True)
    global_vars.publish(Context(config, environment, tokenizer, TrainState()), padded_vocab_size=padded)
    use_schedule(BatchSchedule.from_config(config.training, environment.groups.size("dp")))


def get_model(
    model_provider_func: Callable[..., nn.Module],
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
    config: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[nn.Module]:
    """The chunks of the model on this rank, on its device, in the run's number format; wrapped in
    DistributedDataParallel unless told otherwise. `config` and groups are the run's own."""
    refuse("get_model", {"config": config is not None, "pg_collection": pg_collection is not None})
    providers = providers_of_user_script(_no_datasets, model_provider_func, _no_step)
    wrapped = build_model(global_vars.megatron_lm_run(), providers)
    return [chunk if wrap_with_ddp else chunk.module for chunk in wrapped]


def _no_datasets(*_: Any) -> Sequence[Any]:
    raise AssertionError


def _no_model(*_: Any) -> nn.Module:
    raise AssertionError


def _no_step(*_: Any) -> Any:
    raise AssertionError


def setup_model_and_optimizer(
    model_provider_func: Callable[..., nn.Module], model_type: ModelType, checkpointing_context: Any = None
) -> tuple[list[nn.Module], MegatronOptimizer | None, OptimizerParamScheduler | None]:
    """Model chunks, optimizer and schedule, as --load's checkpoint has them if there is one. With --skip-train the last
    two are None."""
    run = global_vars.megatron_lm_run()
    providers = providers_of_user_script(_no_datasets, model_provider_func, _no_step)
    model = build_model(run, providers)
    optimizer = build_optimizer(run, providers, model)
    scheduler = build_scheduler(run.config, optimizer)
    connect(run.config, model, optimizer)
    Checkpoints(run.config, run.environment.groups).load(run.state, model, optimizer, scheduler)
    if run.config.evaluation.skip_train:
        return [*model], None, None
    return [*model], optimizer, scheduler


def build_train_valid_test_data_iterators(
    build_train_valid_test_datasets_provider: Callable[..., Sequence[Any]],
) -> tuple[Any, Any, Any]:
    """This rank's micro-batches of each split from where the run stands; None where there is no such data. With virtual
    pipeline stages a list each, with an iterator for each model chunk."""
    run = global_vars.megatron_lm_run()
    providers = providers_of_user_script(build_train_valid_test_datasets_provider, _no_model, _no_step)
    splits = build_splits(
        run.config, run.environment, run.state, providers.build_datasets(run, sample_counts(run.config))
    )
    _begun.callback(splits.close)
    chunks = len(stages_of_rank(run.config, run.environment.groups.rank("pp")))
    train, valid, test = (
        [None] * chunks if split is None else split.iterators(chunks)
        for split in (splits.train, splits.valid, splits.test)
    )
    return (train, valid, test) if chunks > 1 else (train[0], valid[0], test[0])


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    config: Any,
    forward_backward_func: Callable[..., Any],
    iteration: int | None = None,
) -> tuple[dict[str, Tensor], int, bool, bool, int, float | None, int | None, None]:
    """One step. Returns (loss_dict, skipped_iter, should_checkpoint, should_exit, exit_code, grad_norm,
    num_zeros_in_grad, max_attention_logit); the last is not measured, the first is empty where the loss is not
    computed. Counts the step in `get_args()`."""
    run = global_vars.megatron_lm_run()
    update_num_microbatches(run.state.consumed_train_samples)
    data = step_data_of(data_iterator) or step_data(run.config, run.environment, None)
    data.begin(run.state.iteration)
    extra = {}
    if takes(forward_backward_func, "before_micro_batch"):
        extra["before_micro_batch"] = lambda number, chunk=0: set_rng_position(model[chunk], data, number)
    for chunk in model:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    optimizer.zero_grad()
    reports = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=list(model),
        num_microbatches=get_num_microbatches(),
        seq_length=run.config.data.seq_length,
        micro_batch_size=get_micro_batch_size(),
        forward_only=False,
        **extra,
    )
    applied, grad_norm, num_zeros = optimizer.step()
    samples = get_current_running_global_batch_size()
    if applied:
        opt_param_scheduler.step(increment=samples)
    run.state.iteration += 1
    run.state.consumed_train_samples += samples
    run.state.consumed_tokens += samples * (run.config.data.seq_length or 0)
    return _mean_reports(reports, run), int(not applied), False, False, 0, grad_norm, num_zeros, None


def _mean_reports(reports: Sequence[Mapping[str, Tensor]], run: Context) -> dict[str, Tensor]:
    """Each loss of the global batch: [sum, count] over all data parallel ranks; one value is the mean over
    micro-batches of this rank."""
    groups, means = run.environment.groups, {}
    for name in reports[0] if reports else ():
        values = torch.stack([report[name].detach().reshape(-1) for report in reports])  # [micro-batches, 1 or 2]
        if values.size(1) == 1:
            means[name] = values.mean()
            continue
        total = values.sum(dim=0)
        total = all_reduce(total, groups.dp_cp) if groups.size("dp_cp") > 1 else total
        means[name] = total[0] / total[1].clamp(min=1)
    return means


def evaluate(
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    model: Sequence[nn.Module],
    process_non_loss_data_func: Callable[..., Any] | None,
    config: Any,
    verbose: bool = False,
    non_loss_data_func: Callable[..., Any] | None = None,
    eval_iters: int | None = None,
) -> tuple[dict[str, Tensor], None, bool]:
    """(mean losses over all their tokens, None, False) of --eval-iters global batches, or of `eval_iters`. There are no
    losses where they are not computed."""
    asked = {"process_non_loss_data_func": process_non_loss_data_func is not None}
    refuse("evaluate", asked | {"non_loss_data_func": non_loss_data_func is not None})
    run = global_vars.megatron_lm_run()
    groups, training = run.environment.groups, run.config.training
    data = step_data_of(data_iterator)
    if data is not None:
        data.begin(run.state.iteration)
    found = run_evaluation(
        get_forward_backward_func(groups.size("pp"), len(model)),
        forward_step_func,
        data_iterator,
        list(model),
        num_iterations=run.config.evaluation.eval_iters if eval_iters is None else eval_iters,
        num_microbatches=BatchSchedule.from_config(training, groups.size("dp")).final_num_microbatches,
        micro_batch_size=training.micro_batch_size,
        seq_length=run.config.data.seq_length or 0,
        device=run.environment.device,
        group=groups.dp_cp if groups.size("dp_cp") > 1 else None,
        data_parallel_size=groups.size("dp"),
    )
    run.state.consumed_valid_samples += found.samples
    if verbose and run.environment.logs:
        print(f"evaluated {found.iterations} iterations, {found.samples} samples", flush=True)
    return {name: torch.tensor(loss) for name, loss in found.losses.items()}, None, False


def refuse(function: str, asked: Mapping[str, bool]) -> None:
    """Raise UserError for the first argument that is given and not supported yet."""
    for name, value in asked.items():
        if value:
            raise UserError(f"{function}({name}=...): not yet")
