"""From a config and the providers of a script to a run that is ready to train."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.exceptions import UserError
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.num_microbatches_calculator import BatchSchedule, use_schedule
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.external import ExternalOptimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.stage_checks import interleaves
from megatron.core.pipeline_parallel.stages import stage_map
from megatron.core.transformer.dot_product_attention import describe_kernels
from megatron.core.transformer.stage_costs import resolve_auto_layout
from megatron.training import global_vars
from megatron.training.checkpointing import Checkpoints
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.splits import Splits, build_splits
from megatron.training.hooks.exit import ExitAgreement, agreement_group
from megatron.training.hooks.gc import ManualGarbageCollection
from megatron.training.hooks.hook import Hook, Hooks
from megatron.training.hooks.profiler import make_profiler
from megatron.training.hooks.signals import SignalWatch
from megatron.training.initialize import Environment
from megatron.training.logging.build import build_log
from megatron.training.logging.finite import GradientProbe
from megatron.training.lr_schedule import build_scheduler
from megatron.training.parallelize import parallelize
from megatron.training.print_config import config_lines
from megatron.training.providers import Context, Providers, SampleCounts, Stage, stages_of_rank
from megatron.training.state import TrainState
from megatron.training.tokenizer.base import Tokenizer
from megatron.training.tokenizer.build import build_tokenizer, padded_vocab_size, padding_line
from megatron.training.trainer import Trainer


def set_up(
    config: PretrainConfig, providers: Providers, environment: Environment, signals: SignalWatch, started: float
) -> Trainer:
    """Build everything, load the checkpoint if there is one, and find the place in the data.

    `started` is `time.monotonic()` at the start of the program, from which --exit-duration-in-mins counts.
    """
    set_torch(config)
    state = TrainState()
    tokenizer = build_tokenizer(config.tokenizer)
    context = Context(config, environment, tokenizer, state)
    padded, found = resolve_vocabulary_and_stages(config, tokenizer)
    if environment.is_first:
        shown = config_lines(config) if config.training.print_config else ()
        print(*config.notes, *shown, *found, padding_line(context.vocab_size, padded), sep="\n", flush=True)
    global_vars.publish(context, padded_vocab_size=padded)
    batches = BatchSchedule.from_config(config.training, environment.groups.size("dp"))
    use_schedule(batches)
    model = build_model(context, providers)
    for line in lines_on_kernels(model, environment, config):
        print(line, flush=True)
    optimizer = build_optimizer(context, providers, model)
    of_script = providers.build_scheduler
    scheduler = build_scheduler(config, optimizer) if of_script is None else of_script(context, optimizer)
    connect(config, model, optimizer)
    checkpoints = Checkpoints(config, environment.groups)
    checkpoints.load(state, model, optimizer, scheduler)
    datasets = providers.build_datasets(context, sample_counts(config))
    forward_step = providers.build_forward_step(context)
    hooks_of_script = () if providers.build_hooks is None else providers.build_hooks(context)
    log = build_log(config, environment, state, padded, model)
    exit_agreement = ExitAgreement(
        agreement_group(),
        rank=environment.rank,
        signals=signals,
        exit_interval=config.training.exit_interval,
        exit_duration_in_mins=config.training.exit_duration_in_mins,
        started=started,
        non_finite=log.metrics.trouble_seen if stops_on_nonfinite(config) else lambda: False,
    )
    # After all else that may fail: from here on there are processes that read ahead, which the run has to end.
    splits = build_splits(config, environment, state, datasets)
    for note in notes_on_run(config, environment, splits):
        if environment.is_first:
            print(note, flush=True)
    return Trainer(
        config=config,
        environment=environment,
        state=state,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        forward_backward=get_forward_backward_func(environment.groups.size("pp"), len(model)),
        forward_step=forward_step,
        splits=splits,
        log=log,
        hooks=Hooks([*build_hooks(config, environment), *hooks_of_script]),
        exit=exit_agreement,
        checkpoints=checkpoints,
        probe=build_probe(config, model),
    )


def resolve_vocabulary_and_stages(config: PretrainConfig, tokenizer: Tokenizer) -> tuple[int, list[str]]:
    """What follows from the vocabulary: the number of stored rows; the stages of the layout `auto`, put into the
    config. And what is to be said about it."""
    transformer, length = config.transformer, config.data.seq_length
    vocab_size = config.tokenizer.model_vocab_size(tokenizer.vocab_size)
    padded = padded_vocab_size(
        vocab_size, config.model.make_vocab_size_divisible_by, transformer.tensor_model_parallel_size
    )
    asked = transformer.pipeline_model_parallel_layout
    assert length is not None
    resolve_auto_layout(transformer, length, padded)
    stages = transformer.pipeline_model_parallel_layout
    return padded, [] if stages == asked else [f"--pipeline-model-parallel-layout {asked}: stages {stages}"]


def lines_on_kernels(model: Sequence[nn.Module], environment: Environment, config: PretrainConfig) -> Iterator[str]:
    """Which kernels compute the layers of this pipeline stage, on its first rank. The backend, which all stages have
    in common, is told by the stage that has the first layer."""
    groups, stages = environment.groups, stage_map(config.transformer)
    if any(groups.rank(axis) for axis in ("tp", "cp", "dp")):
        return
    begins = any(1 in stages.part(groups.rank("pp"), chunk).layers for chunk in range(stages.chunks))
    for line in describe_kernels(nn.ModuleList(model), environment.device, config.data.reset_attention_mask):
        if begins or line.startswith("attention"):
            yield line


def notes_on_run(config: PretrainConfig, environment: Environment, splits: Splits) -> Iterator[str]:
    """What a run does otherwise than one may expect, a line each. Raises UserError if there is nothing to do at all."""
    evaluation = config.evaluation
    groups = environment.groups
    if interleaves(config.transformer) and groups.size("ep") * groups.size("expt_tp") == 1:
        yield (
            "--overlap-moe-expert-parallel-comm: every rank has all experts whole, so there is no exchange to hide; "
            "micro-batches take turns all the same, and one more is held"
        )
    if config.transformer.fp16 and environment.device.type == "cpu":
        yield "--fp16 on a CPU: products and sums are computed in float32 and rounded to float16"
    if evaluation.skip_train and splits.valid is None and splits.test is None:
        raise UserError(
            "--skip-train: there is no validation and no test data to evaluate; give each a share in --split, or files"
        )
    if evaluation.eval_iters == 0:
        yield "--eval-iters 0: nothing is evaluated, neither in between nor at the end"
        return
    missing = [name for name, data in (("validation", splits.valid), ("test", splits.test)) if data is None]
    if missing:
        yield f"there is no {' and no '.join(missing)} data: no loss on it will be printed"
    if len(missing) < 2:
        samples = evaluation.eval_iters * config.training.global_batch_size
        yield f"an evaluation takes {evaluation.eval_iters} global batches, {samples:,} samples, not a whole data set"
    if splits.valid is not None and evaluation.eval_interval is None and not evaluation.skip_train:
        yield "without --eval-interval the validation data is looked at once, after the last iteration"


def set_torch(config: PretrainConfig) -> None:
    """What the flags say about torch and Python as a whole; each run sets all of it anew."""
    torch.manual_seed(config.seed)  # for what a script's own modules draw; ours draw by place
    deterministic = config.transformer.deterministic_mode
    if deterministic:  # cuBLAS wants its workspace fixed, before it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(deterministic)
    if config.logging.logging_level is not None:
        logging.getLogger().setLevel(config.logging.logging_level)


def build_model(context: Context, providers: Providers) -> list[DistributedDataParallel]:
    """This rank's model chunks, one for each of its virtual pipeline stages, wrapped."""
    config, environment = context.config, context.environment
    stages = stages_of_rank(config, environment.groups.rank("pp"))
    return [parallelize(build_chunk(context, providers, stage), config, environment) for stage in stages]


def build_chunk(context: Context, providers: Providers, stage: Stage) -> nn.Module:
    """One model chunk, with --init-model-with-meta-device without memory."""
    with torch.device("meta") if context.config.transformer.init_model_with_meta_device else contextlib.nullcontext():
        return providers.build_model(context, stage)


def build_optimizer(context: Context, providers: Providers, model: Sequence[nn.Module]) -> MegatronOptimizer:
    """What the flags say, or what the script's own piece makes."""
    config = context.config
    if providers.build_optimizer is None:
        return get_megatron_optimizer(
            config.optimizer,
            model,
            pg_collection=context.environment.groups,
            stop_on_nonfinite=stops_on_nonfinite(config),
        )
    made: Any = providers.build_optimizer(context, model)
    return made if isinstance(made, MegatronOptimizer) else ExternalOptimizer(config.optimizer, made, model)


def connect(config: PretrainConfig, model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Tell the schedules, through the published fields of the model's config, how to end a backward pass."""
    transformer = config.transformer
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = finalize_model_grads
    wrapped = [chunk.no_sync for chunk in model]
    transformer.no_sync_func = wrapped if len(wrapped) > 1 else wrapped[0]


def stops_on_nonfinite(config: PretrainConfig) -> bool:
    """A non-finite loss or gradient ends the run, instead of costing one update."""
    resilience = config.resilience
    return resilience.check_for_nan_in_loss_and_grad and resilience.nonfinite_action == "stop"


def build_probe(config: PretrainConfig, model: Sequence[nn.Module]) -> GradientProbe | None:
    """Watches the gradient that reaches the embedding, which has passed every layer."""
    if not config.resilience.check_for_nan_in_loss_and_grad:
        return None
    embeddings = [module for chunk in model for module in chunk.modules() if isinstance(module, LanguageModelEmbedding)]
    return GradientProbe(embeddings[0]) if embeddings else None


def build_hooks(config: PretrainConfig, environment: Environment) -> list[Hook]:
    """What only some runs do."""
    hooks: list[Hook] = []
    if config.training.manual_gc:
        hooks.append(ManualGarbageCollection(config.training.manual_gc_interval, config.training.manual_gc_eval))
    flags = config.logging
    if flags.profile:
        profiler = make_profiler(
            rank=environment.rank,
            ranks=flags.profile_ranks,
            start=flags.profile_step_start,
            end=flags.profile_step_end,
            use_pytorch_profiler=flags.use_pytorch_profiler,
            directory=flags.tensorboard_dir or config.checkpoint.save,
            record_shapes=flags.record_shapes or flags.pytorch_profiler_collect_shapes,
            with_stack=flags.pytorch_profiler_collect_callstack,
            all_threads=interleaves(config.transformer),  # backwards have a thread of their own
        )
        hooks += [profiler] if profiler is not None else []
    return hooks


def sample_counts(config: PretrainConfig) -> SampleCounts:
    """Samples that training and every evaluation of the run together ask of each split."""
    training, evaluation = config.training, config.evaluation
    batch, iterations = training.global_batch_size, training.train_iters
    rounds = iterations // evaluation.eval_interval + 1 if evaluation.eval_interval else 1
    train = training.train_samples or iterations * batch
    each = evaluation.eval_iters * batch
    return SampleCounts(train, each if evaluation.skip_train else rounds * each, each)
