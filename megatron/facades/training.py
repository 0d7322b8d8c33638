"""Megatron-LM's training functions, under their names and signatures.

`pretrain` trains a whole run (megatron.facades.pretrain). The others serve a script that writes its own loop (see
megatron.facades.initialize): they act on the run that `initialize_megatron` started, or that `pretrain` set up last.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron.core.communication.collectives import all_reduce, barrier
from megatron.core.declarations.enums import ModelType
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils.keywords import Keywords
from megatron.diagnosis.non_finite import dump_and_search
from megatron.facades import global_vars
from megatron.facades.arguments import check_can_train
from megatron.facades.batches import update_seqlen_stats_from_cu_seqlens as update_seqlen_stats_from_cu_seqlens
from megatron.facades.checkpointing import checkpoints_of_run
from megatron.facades.initialize import close_with_run
from megatron.facades.num_microbatches_calculator import (
    get_current_running_global_batch_size,
    get_micro_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.facades.pretrain import non_loss_functions
from megatron.facades.pretrain import pretrain as pretrain
from megatron.facades.script_providers import datasets_builder, model_builder, refuse, reporting_tensors
from megatron.facades.utils import print_rank_0, print_rank_last
from megatron.homes import lazy_names
from megatron.training import loop
from megatron.training.checkpoint_checks import check_before_build
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from megatron.training.data.splits import Splits, build_splits, step_data
from megatron.training.data.step_data import StepData, step_data_of
from megatron.training.evaluate import evaluate as run_evaluation
from megatron.training.launch.signals import DEFAULT_SIGNALS, SignalWatch
from megatron.training.log.console_line import perplexity
from megatron.training.log.throughput import flops_of_samples
from megatron.training.lr_schedule import build_scheduler
from megatron.training.providers import Context, NonLossFunctions, SampleCounts, stages_of_rank
from megatron.training.setup.model import build_model, build_optimizer, stops_on_nonfinite
from megatron.training.setup.set_up import ScriptParts, build_trainer
from megatron.training.setup.sizes import sample_counts
from megatron.training.state import SavedParts


def get_model(
    model_provider_func: Callable[..., nn.Module],
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
    config: object = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[nn.Module]:
    """Returns the model chunks of this rank, on its device and in the run's number format, wrapped in
    DistributedDataParallel unless `wrap_with_ddp` is False. Raises UserError for `config` and `pg_collection`: those of
    the run are used."""
    refuse("get_model", {"config": config is not None, "pg_collection": pg_collection is not None})
    wrapped = build_model(global_vars.current_run(), model_builder(model_provider_func))
    return [chunk if wrap_with_ddp else chunk.module for chunk in wrapped]


def setup_model_and_optimizer(
    model_provider_func: Callable[..., nn.Module], model_type: ModelType, checkpointing_context: object = None
) -> tuple[list[nn.Module], MegatronOptimizer | None, OptimizerParamScheduler | None]:
    """Returns model chunks, optimizer and schedule, loaded from --load's checkpoint if there is one. With --skip-train
    the last two are None."""
    run = global_vars.current_run()
    check_can_train(run.config)
    check_before_build(run.config)
    model = build_model(run, model_builder(model_provider_func))
    optimizer = build_optimizer(run, model)
    scheduler = build_scheduler(run.config, optimizer)
    checkpoints_of_run(run).load(SavedParts(run.state, model, optimizer, scheduler))
    if run.config.evaluation.skip_train:
        return [*model], None, None
    return [*model], optimizer, scheduler


def build_train_valid_test_data_iterators(
    build_train_valid_test_datasets_provider: Callable[..., Sequence[object]],
) -> tuple[Any, Any, Any]:
    """Returns this rank's micro-batches of each split, from the run's place in the data; None for a split without data.
    With virtual pipeline stages each is a list with one iterator per model chunk."""
    run = global_vars.current_run()
    build_datasets = datasets_builder(build_train_valid_test_datasets_provider)
    splits = build_splits(
        run.config, run.environment, run.state, build_datasets(run, sample_counts(run.config, run.state))
    )
    close_with_run(splits.close)
    if splits.valid_sets:
        flags = "--multiple-validation-sets" if run.config.evaluation.multiple_validation_sets else "--full-validation"
        raise UserError(f"{flags}: the loop of a script has one validation iterator; call pretrain(), or leave it out")
    chunks = len(stages_of_rank(run.config, run.environment.groups.rank("pp")))
    train, valid, test = (
        [None] * chunks if split is None else split.iterators(chunks)
        for split in (splits.train, splits.valid, splits.test)
    )
    return (train, valid, test) if chunks > 1 else (train[0], valid[0], test[0])


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> DataLoader[Any] | None:
    """Returns a torch DataLoader of this rank's micro-batches from a sample of the run on, in the order of
    --dataloader-type, with torch's own collation; None without a dataset. Raises UserError for --balanced-packing and
    --hybrid-context-parallel."""
    if dataset is None:
        return None
    run = global_vars.current_run()
    groups, training, data = run.environment.groups, run.config.training, run.config.data
    for flag, given in (
        ("--balanced-packing", data.balanced_packing),
        ("--hybrid-context-parallel", run.config.transformer.hybrid_context_parallel),
    ):
        if given:
            raise UserError(
                f"build_pretraining_data_loader(): {flag} needs pretrain(), which orders the rows; leave it out"
            )
    place = (training.micro_batch_size, groups.rank("dp"), groups.size("dp"))
    sampler: Any
    if data.dataloader_type == "cyclic":
        sampler = MegatronPretrainingRandomSampler(dataset, len(dataset), consumed_samples, *place, data.data_sharding)
    elif data.dataloader_type in (None, "single"):
        sampler = MegatronPretrainingSampler(len(dataset), consumed_samples, *place)
    else:
        return dataset
    workers = data.num_workers
    return DataLoader(dataset, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


def get_train_valid_test_num_samples() -> tuple[int, int | None, int | None]:
    """Returns the numbers of samples that training, and all evaluations together, need of each split. The loader of a
    script continues from one evaluation to the next, so they are those of --eval-fresh-samples."""
    run = global_vars.current_run()
    counts = sample_counts(run.config, run.state, fresh=True)
    return counts.train, counts.valid, counts.test


def build_train_valid_test_datasets(
    build_train_valid_test_datasets_provider: Callable[..., Sequence[object]],
    train_valid_test_num_samples: Sequence[int | None] | None = None,
) -> Sequence[Any]:
    """Returns the datasets that the provider builds for these numbers of samples, or for those of
    `get_train_valid_test_num_samples`."""
    run = global_vars.current_run()
    counts = sample_counts(run.config, run.state, fresh=True)
    if train_valid_test_num_samples is not None:
        train_samples, *others = train_valid_test_num_samples
        counts = SampleCounts(train_samples or 0, *others)
    return datasets_builder(build_train_valid_test_datasets_provider)(run, counts)


def get_optimizer_param_scheduler(optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Returns the schedule of learning rate and weight decay that the flags describe."""
    config = global_vars.current_run().config
    check_can_train(config)
    return build_scheduler(config, optimizer)


def num_floating_point_operations(args: object, batch_size: int) -> int:
    """Returns the floating point operations of a training step over `batch_size` sequences of the run. The settings are
    those of the run; `args` has no effect."""
    rows = global_vars.get_args().padded_vocab_size
    return flops_of_samples(global_vars.current_run().config, rows, batch_size)


def cyclic_iter(iter: Iterable[object]) -> Iterator[Any]:
    """Yields the items of an iterable again and again."""
    while True:
        yield from iter


def print_datetime(string: str) -> None:
    """Waits for all ranks and prints the time on the first."""
    if dist.is_initialized():
        barrier()
    print_rank_0(f"[{string}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}")


def evaluate_and_print_results(
    prefix: str,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | Sequence[Iterator[object]] | None,
    model: Sequence[nn.Module],
    iteration: int,
    process_non_loss_data_func: Callable[..., Any] | None,
    config: object,
    verbose: bool = False,
    write_to_tensorboard: bool = True,
    non_loss_data_func: Callable[..., object] | None = None,
) -> None:
    """Calls `evaluate`, and prints the mean losses on the last rank. With the writer of --tensorboard-dir, losses and
    data that are no losses go there."""
    losses, collected, _ = evaluate(
        forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose, non_loss_data_func
    )
    writer = global_vars.get_tensorboard_writer()
    if losses:
        words = [
            f"{name} value: {loss.item():.6E} | {name} PPL: {perplexity(loss.item()):.6E}"
            for name, loss in losses.items()
        ]
        print_rank_last(f" validation loss at {prefix} | {' | '.join(words)}")
    if writer is not None:
        for name, loss in losses.items() if write_to_tensorboard else ():
            writer.add_scalar(f"{name} validation", loss.item(), iteration)
        if process_non_loss_data_func is not None:
            process_non_loss_data_func(collected, iteration, writer)


def train(
    forward_step_func: Callable[..., Any],
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    train_data_iterator: Iterator[object] | Sequence[Iterator[Any]] | None,
    valid_data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    process_non_loss_data_func: Callable[..., object] | None = None,
    config: object = None,
    checkpointing_context: object = None,
    non_loss_data_func: Callable[..., object] | None = None,
) -> tuple[int, float]:
    """Trains to the last iteration as `pretrain` does: log lines, validations, checkpoints, signals.

    Returns (iteration, floating point operations so far). Ends the program with the decision's exit code if the ranks
    agree to exit early. `config` has no effect: the run's own is used. The functions of non-loss data are those of
    `pretrain`. Raises UserError for --loss-spike-action, which needs `pretrain`.
    """
    run, started = global_vars.current_run(), time.monotonic()
    global_vars.let_script_count(False)
    if run.config.resilience.loss_spike_action is not None:
        raise UserError("train(): --loss-spike-action needs pretrain(), which opens the data again; leave it out")
    forward_step_func = reporting_tensors(forward_step_func)
    first_valid = valid_data_iterator[0] if isinstance(valid_data_iterator, Sequence) else valid_data_iterator
    train_data, valid_data = _step_data(train_data_iterator, run), _step_data(valid_data_iterator, run)
    splits = Splits(train_data, None if first_valid is None else valid_data, None)
    chunks: Any = model
    with SignalWatch(sorted({*DEFAULT_SIGNALS, run.config.resilience.exit_signal})) as signals, signals.training():
        signals.remember(global_vars.remembered_signal())  # one that came during the set-up
        parts = SavedParts(run.state, chunks, optimizer, opt_param_scheduler)
        non_loss = non_loss_functions(non_loss_data_func, process_non_loss_data_func, run.config)
        script = ScriptParts(forward_step_func, open_data=lambda: splits, non_loss=non_loss)
        trainer = build_trainer(run, parts, checkpoints_of_run(run), script, signals, started)
        try:
            decision = loop.train(trainer)
            if decision is not None:
                dump_and_search(trainer, decision)
            trainer.close_training()
        except BaseException as error:
            trainer.close_after_failure(error)
            raise
    if decision is not None:
        raise SystemExit(decision.exit_code)
    return run.state.iteration, run.state.floating_point_operations_so_far


def _step_data(data_iterator: Iterator[object] | Sequence[Iterator[object]] | None, run: Context) -> StepData:
    """Returns the micro-batches behind a script's iterator. Raises UserError for iterators of its own for several
    chunks."""
    found = step_data_of(data_iterator)
    if found is not None:
        return found
    if isinstance(data_iterator, Sequence):
        if any(iterator is not None for iterator in data_iterator[1:]):
            raise UserError(
                "train(): with virtual pipeline stages the data iterators must be those of "
                "build_train_valid_test_data_iterators()"
            )
        data_iterator = data_iterator[0]
    return step_data(run.config, run.environment, data_iterator)


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[object] | Sequence[Iterator[object]] | None,
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    config: object,
    forward_backward_func: Callable[..., object],
    iteration: int | None = None,
) -> tuple[dict[str, Tensor], int, bool, bool, int, float | None, int | None, float | None]:
    """Runs one training step and counts it in `get_args()`. Waits for the device.

    Returns (loss_dict, skipped_iter, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros_in_grad,
    max_attention_logit), without the last one for Accelerate's plugin. `loss_dict` is empty on ranks that compute no
    loss; the last value is None without --log-max-attention-logit or --qk-clip. A loss or gradient that is not finite
    skips the update on all ranks (`skipped_iter` 1); unless --nonfinite-action is skip, every later update is skipped
    too, and `should_exit` is True with exit code 1.
    """
    result = _train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, forward_backward_func)
    return result[:7] if global_vars.drives_plugin() else result  # type: ignore[return-value]


def _train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[object] | Sequence[Iterator[object]] | None,
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    forward_backward_func: Callable[..., object],
) -> tuple[dict[str, Tensor], int, bool, bool, int, float | None, int | None, float | None]:
    run = global_vars.current_run()
    global_vars.let_script_count(global_vars.drives_plugin())
    update_num_microbatches(run.state.consumed_train_samples)
    samples = get_current_running_global_batch_size()
    data = step_data_of(data_iterator) or step_data(run.config, run.environment, None)
    data.begin(run.state.iteration)
    available: dict[str, Any] = loop.arguments_of_schedule(optimizer, data)
    accepted = Keywords.of(forward_backward_func).chosen_from(available)
    forward_step = reporting_tensors(forward_step_func)
    length, decoder_length = run.config.data.seq_length or 0, run.config.decoder_seq_length
    sizes = loop.StepSizes(get_num_microbatches(), get_micro_batch_size(), length, samples, decoder_length)
    result = loop.run_step(
        loop.StepParts(forward_backward_func, forward_step, model, optimizer, opt_param_scheduler, timers=run.timers),
        sizes,
        data_iterator,
        accepted,
    )
    run.state.add_step(samples, tokens=samples * length)
    if global_vars.drives_plugin():
        run.state.consumed_train_samples -= samples  # the plugin adds them
    losses, update = _mean_reports(result.reports, run), result.update
    if not update.update_applied.item():
        halted = _is_halted(optimizer, run.config)
        return losses, 1, False, halted, int(halted), None, None, None
    zeros = None if update.num_zeros is None else int(update.num_zeros.item())
    logit = None if update.max_attention_logit is None else update.max_attention_logit.item()
    return losses, 0, False, False, 0, update.grad_norm.item(), zeros, logit


def _is_halted(optimizer: MegatronOptimizer, config: PretrainConfig) -> bool:
    """After a skipped update: the run must end because of it. An overflow under a float16 loss scale is no reason."""
    if isinstance(optimizer, FlatOptimizer):
        return bool(optimizer.halted.item())
    return stops_on_nonfinite(config)


def _mean_reports(reports: Sequence[Mapping[str, Tensor]], run: Context) -> dict[str, Tensor]:
    """Returns the mean of each loss over the tokens of the global batch, on all data parallel ranks; a loss that is
    reported as one value is averaged over the micro-batches of this rank."""
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
    config: object,
    verbose: bool = False,
    non_loss_data_func: Callable[..., Any] | None = None,
    eval_iters: int | None = None,
) -> tuple[dict[str, Tensor], Any, bool]:
    """Returns (mean losses over all their tokens, data that are no losses, False) of --eval-iters global batches, or of
    `eval_iters`. The losses are empty on ranks that do not compute them. The data are those of `NonLossFunctions`: None
    unless a function for them is given; `process_non_loss_data_func` is not called."""
    non_loss = NonLossFunctions(non_loss_data_func, process_non_loss_data_func)
    collects = non_loss_data_func is not None or process_non_loss_data_func is not None
    run = global_vars.current_run()
    groups, training = run.environment.groups, run.config.training
    data = step_data_of(data_iterator)
    if data is not None:
        data.begin(run.state.iteration)
    result = run_evaluation(
        get_forward_backward_func(groups.size("pp"), len(model)),
        reporting_tensors(forward_step_func),
        data_iterator,
        list(model),
        num_iterations=run.config.evaluation.eval_iters if eval_iters is None else eval_iters,
        num_microbatches=run.config.evaluation.num_microbatches(training, groups.size("dp")),
        micro_batch_size=run.config.evaluation.micro_batch_size(training),
        seq_length=run.config.data.seq_length or 0,
        decoder_seq_length=run.config.decoder_seq_length,
        device=run.environment.device,
        group=groups.dp_cp if groups.size("dp_cp") > 1 else None,
        data_parallel_size=groups.size("dp"),
        non_loss=non_loss if collects else None,
    )
    run.state.consumed_valid_samples += result.samples
    if verbose and run.environment.logs:
        print(f"evaluated {result.iterations} iterations, {result.samples} samples", flush=True)
    return {name: torch.tensor(loss) for name, loss in result.losses.items()}, result.non_loss_data, False


__getattr__ = lazy_names(__name__, {"training_log": "megatron.facades.accelerate_plugin"})
