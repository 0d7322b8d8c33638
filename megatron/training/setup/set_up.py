"""Builds a Trainer from a config and the providers of a script."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.timers import Timers, timed
from megatron.core.utils.url_keys import hide_keys
from megatron.core.utils.warn import leave_out
from megatron.data.evaluation.requests import PreparedTask
from megatron.data.tokenizer.build import build_tokenizer, padding_line
from megatron.training.adapters import begin_with_base
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.checkpoint_checks import check_before_build, check_vocabulary
from megatron.training.checkpoints import Checkpoints
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.data_checks import check_data_of_run
from megatron.training.data.data_contract import keep_data_contract
from megatron.training.data.data_record import data_digests, order_of
from megatron.training.data.splits import Splits, build_splits
from megatron.training.evaluation.predictor import LayoutPredictor
from megatron.training.evaluation.tasks import EvaluationTasks, prepare_tasks
from megatron.training.hooks.exit import ExitAgreement, agreement_group
from megatron.training.hooks.hook import Hook, Hooks
from megatron.training.hooks.mix_report import Mix, MixReport
from megatron.training.hooks.profiler import nvtx_marks
from megatron.training.hooks.step_tensors import StepTensors
from megatron.training.inspection.print_config import config_lines
from megatron.training.launch.environment import Environment
from megatron.training.launch.errors import explains_lack_of_host_memory
from megatron.training.launch.signals import SignalWatch
from megatron.training.log.build import build_log
from megatron.training.lr_schedule import build_scheduler
from megatron.training.providers import Context, ForwardStep, NonLossFunctions, Providers
from megatron.training.setup.graphs import capture_micro_batches
from megatron.training.setup.hooks import build_hooks
from megatron.training.setup.model import build_model, build_optimizer, stops_on_nonfinite
from megatron.training.setup.notes import data_plan, holding_notes, kernel_notes, run_notes
from megatron.training.setup.sizes import (
    check_length,
    resolve_auto_layout,
    sample_counts,
    samples_to_read,
    vocabulary_rows,
    with_steps_left,
)
from megatron.training.setup.watching import (
    build_loss_spikes,
    build_probe,
    build_rerun_state_machine,
    mix_of,
    timed_forward_step,
)
from megatron.training.skipped_updates import count_of_skipped_updates
from megatron.training.state import SavedParts, TrainState
from megatron.training.trainer import Trainer


def set_up(
    config: PretrainConfig, providers: Providers, environment: Environment, signals: SignalWatch, started: float
) -> Trainer:
    """Builds all parts of a run, loads the checkpoint if there is one, and opens the data where the run stopped.

    `started` is `time.monotonic()` at the start of the program, from which --exit-duration-in-mins counts.
    """
    # What flags leave open is settled first, and nothing changes the config afterwards: the length of training follows
    # from the checkpoint, the layout `auto` from the vocabulary.
    counts_samples = config.training.train_samples is not None
    saved = Checkpoints(config, environment.groups).state_to_load() if counts_samples else TrainState()
    config, note_on_length = with_steps_left(config, saved)
    context = start_run(config, environment)
    config, timers = context.config, context.timers
    if config.transformer.hybrid_context_parallel and not providers.cuts_shared_batches:
        raise UserError(
            "--hybrid-context-parallel: the script does not say that its forward step cuts each batch over "
            "batch.local_cp_size ranks (Providers.cuts_shared_batches), as pretrain_gpt.py does; leave the flag out"
        )
    check_before_build(config, schedule_of_flags=providers.build_scheduler is None)
    if not providers.own_vocabulary:
        check_vocabulary(config, (context.vocab_size, vocabulary_rows(config, context.tokenizer)))
    check_data_of_run(config, context.tokenizer)
    keep_data_contract(config, context.tokenizer)
    tasks = prepare_tasks(config.evaluation.eval_tasks, context.tokenizer, config.data.seq_length or 0)
    with timed(timers, "model-and-optimizer-setup", 0, barrier=True), explains_lack_of_host_memory():
        model = build_model(context, providers.build_model)
        parts_by_rank = holding_notes(model, environment.groups, config.transformer)
        if environment.is_first:
            print(*parts_by_rank, sep="\n", flush=True)
        for line in kernel_notes(model, environment, config):
            print(line, flush=True)
        optimizer = build_optimizer(context, model, providers.build_optimizer)
        build_own = providers.build_scheduler
        scheduler = build_scheduler(config, optimizer) if build_own is None else build_own(context, optimizer)
        spikes = build_loss_spikes(config, environment, optimizer)
        parts = SavedParts(context.state, model, optimizer, scheduler, spikes)
        checkpoints = Checkpoints(config, environment.groups)
        checkpoints.base = begin_with_base(context, parts, providers)
        loaded = checkpoints.load(parts)
        if not loaded and checkpoints.base is None and providers.load_first_weights is not None:
            providers.load_first_weights(context, model, optimizer)
            if optimizer.average is not None:
                optimizer.average.restart()
        check_length(config, context.state)
        if environment.is_first and note_on_length:
            print(note_on_length, flush=True)
        if parts.state.iteration < config.training.train_iters and not config.evaluation.skip_train:
            checkpoints.check_room(parts, with_optimizer=providers.build_optimizer is None)
    with timed(timers, "train/valid/test-data-iterators-setup", 0):
        environment.progress.enter("building datasets")
        counts = sample_counts(config, context.state)
        datasets = providers.build_datasets(context, counts)
        mix = mix_of(config, datasets[0])
        order = order_of(datasets[0], config.data.dataloader_type or "single")
        digests = data_digests(config) if environment.is_first else {}
        checkpoints.take_data(digests, order, mix, context.state.consumed_train_samples)
        if environment.is_first:
            for line in data_plan(datasets, samples_to_read(config, counts), config.data.seq_length or 0):
                print(line, flush=True)
    hooks_of_script = () if providers.build_hooks is None else providers.build_hooks(context)
    if mix is not None and not mix.has_several:
        mix = None
    if mix is not None and environment.is_first:
        hooks_of_script = (MixReport(mix, context.state, config.logging.log_interval), *hooks_of_script)
    forward_step = timed_forward_step(providers.build_forward_step(context), config, environment)
    script = ScriptParts(
        forward_step,
        open_data=lambda: build_splits(config, environment, context.state, datasets, timers),
        hooks=hooks_of_script,
        mix=mix,
        non_loss=providers.non_loss,
        tasks=tasks,
    )
    trainer = build_trainer(context, parts, checkpoints, script, signals, started)
    timers.log(["model-and-optimizer-setup", "train/valid/test-data-iterators-setup"])
    for note in run_notes(config, environment, trainer.splits):
        if environment.is_first:
            print(note, flush=True)
    return trainer


def start_run(config: PretrainConfig, environment: Environment) -> Context:
    """Sets torch's options, builds the tokenizer, prints the notes on the flags, and makes this the run that
    `get_args()` and Megatron-LM's other functions act on. Returns the context for the providers."""
    set_torch(config)
    tokenizer = build_tokenizer(config.tokenizer)
    padded = vocabulary_rows(config, tokenizer)
    config, notes = resolve_auto_layout(config, padded)
    flags = config.logging
    mark = nvtx_marks(
        wanted=flags.profile and flags.nvtx_ranges and environment.rank in flags.profile_ranks,
        use_pytorch_profiler=flags.use_pytorch_profiler,
        notes=environment.rank in flags.profile_ranks[:1],
    )
    timers = Timers(flags.timing_log_level, flags.timing_log_option, mark)
    context = Context(config, environment, tokenizer, TrainState(), timers)
    leave_out(config.notes)
    if environment.is_first:
        settings = config_lines(config) if config.training.print_config else ()
        lines = *config.notes, *settings, *notes, padding_line(context.vocab_size, padded)
        print(*map(hide_keys, lines), sep="\n", flush=True)
    environment.publication.begin(context, padded_vocab_size=padded)
    environment.publication.set_schedule(
        BatchSchedule.from_config(config.training, environment.groups.size("dp"), config.data.seq_length)
    )
    return context


@dataclass(frozen=True)
class ScriptParts:
    """The parts of a run that come from the script and its data, without model, optimizer and scheduler."""

    forward_step: ForwardStep
    open_data: Callable[[], Splits]
    """Opens the data at the counts of the run's state. It starts processes that read ahead, which the trainer ends."""
    hooks: Sequence[Hook] = ()
    """Called after the hooks that flags add."""
    mix: Mix | None = None
    """Computes the share of each data set of a blend, for log lines."""
    non_loss: NonLossFunctions | None = None
    """The script's functions for data of evaluations other than losses."""
    tasks: Sequence[PreparedTask] = ()
    """The tasks of --eval-tasks."""


def build_trainer(
    context: Context,
    parts: SavedParts,
    checkpoints: Checkpoints,
    script: ScriptParts,
    signals: SignalWatch,
    started: float,
) -> Trainer:
    """Adds log, exit agreement, hooks and data to a model that is ready to train. The data is opened last. `started` is
    the `time.monotonic()` from which --exit-duration-in-mins counts."""
    config, environment, state = context.config, context.environment, context.state
    model, optimizer, spikes = parts.model, parts.optimizer, parts.spikes
    batches = BatchSchedule.from_config(config.training, environment.groups.size("dp"), config.data.seq_length)
    environment.publication.set_schedule(batches)
    rows = vocabulary_rows(config, context.tokenizer)
    log = build_log(config, environment, state, rows, model, context.timers, script.mix)
    environment.publication.set_writers(log.tensorboard_writer, log.wandb)
    skips = count_of_skipped_updates(config, environment.device)
    exit_agreement = ExitAgreement(
        agreement_group(timedelta(minutes=config.parallel.distributed_timeout_minutes)),
        rank=environment.rank,
        signals=signals,
        exit_interval=config.training.exit_interval,
        exit_duration_in_mins=config.training.exit_duration_in_mins,
        started=started,
        non_finite=log.metrics.trouble_seen if stops_on_nonfinite(config) else lambda: False,
        loss_spike=spikes.ends_run if spikes is not None else lambda: False,
        skipped_updates=skips.too_many,
    )
    probe, results = build_probe(config, model), build_rerun_state_machine(config)
    forward_backward = get_forward_backward_func(environment.groups.size("pp"), len(model))

    def open_and_watch() -> Splits:
        splits = script.open_data()
        if stops_on_nonfinite(config):
            splits.train.keep_recent_steps()
        return splits

    hooks = [*build_hooks(config, environment, state, model), *script.hooks]
    update = None
    for hook in hooks:
        if isinstance(hook, StepTensors):
            update = hook.around(optimizer.step_on_device)
    splits = open_and_watch()
    return Trainer(
        config=config,
        environment=environment,
        state=state,
        model=model,
        optimizer=optimizer,
        scheduler=parts.scheduler,
        batches=batches,
        forward_backward=capture_micro_batches(forward_backward, config, environment, model, probe, results),
        forward_step=script.forward_step,
        splits=splits,
        log=log,
        hooks=Hooks(hooks),
        exit=exit_agreement,
        checkpoints=checkpoints,
        probe=probe,
        results=results,
        update=update,
        spikes=spikes,
        skips=skips,
        open_data=open_and_watch,
        non_loss=script.non_loss,
        tasks=tasks_of_run(context, model, script.tasks),
    )


def tasks_of_run(
    context: Context, model: Sequence[torch.nn.Module], prepared: Sequence[PreparedTask]
) -> EvaluationTasks | None:
    """Returns the tasks with the model that answers them; None without tasks."""
    if not prepared:
        return None
    config, environment = context.config, context.environment
    size, length = config.evaluation.micro_batch_size(config.training), config.data.seq_length or 0
    predictor = LayoutPredictor(model, environment.groups, environment.device, size, length)
    return EvaluationTasks(prepared, predictor, context.tokenizer)


def set_torch(config: PretrainConfig) -> None:
    """Sets the global options of torch and of Python's logging as the flags say. Every run in a process sets all of
    them again."""
    torch.manual_seed(config.seed)  # for a script's own modules; our random numbers depend on seed and position only
    deterministic = config.transformer.deterministic_mode
    if deterministic:  # cuBLAS wants its workspace fixed, before it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(deterministic)
        # Filling each new tensor takes a pass over its memory; our kernels and torch's write all that is read.
        torch.utils.deterministic.fill_uninitialized_memory = not deterministic  # type: ignore[attr-defined]
    reduced = not config.transformer.disable_bf16_reduced_precision_matmul
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
    if config.logging.logging_level is not None:
        logging.getLogger().setLevel(config.logging.logging_level)
