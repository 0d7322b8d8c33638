"""Builds the log that the flags describe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from torch import nn

from megatron.core.declarations.config_fields import value_text
from megatron.core.timers import Timers
from megatron.core.utils.stores import is_url
from megatron.training.config.flag_table import flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.launch.environment import Environment
from megatron.training.log.display import MEGATRON_LM, SHORT, make_display
from megatron.training.log.energy import make_energy_meter
from megatron.training.log.jsonl import JsonlLog
from megatron.training.log.layer_reports import LayerReports
from megatron.training.log.metrics import StepMetrics
from megatron.training.log.records import LogWriter
from megatron.training.log.spikes import SpikeWatch
from megatron.training.log.tensorboard import TagChoices, tensorboard_log, wandb_log
from megatron.training.log.throughput import flops_of_samples, peak_tflops
from megatron.training.log.trackers import RunFacts, tracker_log
from megatron.training.log.training_log import TrainingLog
from megatron.training.state import TrainState


def build_log(
    config: PretrainConfig,
    environment: Environment,
    state: TrainState,
    padded_vocab_size: int,
    model: Sequence[nn.Module],
    timers: Timers,
    mix: Callable[[int], Mapping[str, float]] | None = None,
) -> TrainingLog:
    """Returns the log of this rank. Only one of the ranks that compute losses writes it. Raises UserError for a file or
    folder that cannot be written. `mix` returns the share of each data set of a blend, for log lines."""
    transformer, length, groups = config.transformer, config.data.seq_length, environment.groups
    assert length is not None and config.training.train_iters is not None
    metrics = StepMetrics(
        environment.device,
        group=groups.dp_cp if groups.size("dp_cp") > 1 else None,
        rank=environment.rank,
        expect_overflow=transformer.fp16 and config.optimizer.loss_scale is None,
        # Tensor parallel ranks see the same values. Only their stages see the loss and the embedding's gradient.
        names=groups.rank("tp") == 0 and (environment.has_loss or groups.rank("pos_embd") >= 0),
        watch=config.resilience.check_for_nan_in_loss_and_grad,
    )
    peak = peak_tflops(environment.device, transformer.params_dtype, fp8=transformer.fp8 is not None)
    if config.logging.log_throughput and peak is None and environment.logs:
        print("--log-throughput: the peak rate of this device is not known, so no utilisation is given", flush=True)
    first_replica, on_gpu = not (groups.rank("dp") or groups.rank("cp")), environment.device.type == "cuda"
    if config.logging.log_device_memory_used and not on_gpu and environment.logs:
        print(
            "--log-device-memory-used: the log shows the memory of the host only, since this run has no GPU", flush=True
        )
    return TrainingLog(
        metrics,
        _writers(config, environment, state) if environment.logs else (),
        train_iters=config.training.train_iters,
        log_interval=config.logging.log_interval,
        world_size=environment.world_size,
        tokens_per_sample=length,
        flops_per_sample=flops_of_samples(config, padded_vocab_size, 1),
        peak_tflops=peak,
        log_throughput=config.logging.log_throughput,
        layers=LayerReports(model, groups, environment.device),
        per_layer=transformer.moe_per_layer_logging,
        timers=timers,
        reports_memory=on_gpu and first_replica,
        memory_interval=config.logging.log_memory_interval if first_replica else None,
        device_memory_used=config.logging.log_device_memory_used,
        energy=make_energy_meter(environment.device, notes=environment.logs) if config.logging.log_energy else None,
        mix=mix,
    )


def _only_evaluates(config: PretrainConfig, state: TrainState) -> bool:
    """Whether the run evaluates a checkpoint and does not train on."""
    finished = state.iteration >= (config.training.train_iters or 0)
    evaluation = config.evaluation
    return (evaluation.eval_iters > 0 or evaluation.eval_tasks is not None) and (finished or evaluation.skip_train)


def _writers(config: PretrainConfig, environment: Environment, state: TrainState) -> list[LogWriter]:
    logging = config.logging
    losses, gradients = config.resilience.check_for_spiky_loss, config.ddp.check_for_large_grads
    writers: list[LogWriter] = [SpikeWatch(losses, gradients)] if losses or gradients else []
    if logging.metrics_path is not None:
        named_by = "--save:" if config.provenance.get("metrics_path") == "derived" else "--metrics-path"
        writers.append(JsonlLog(logging.metrics_path, state.iteration, named_by, _only_evaluates(config, state)))
    flags: dict[str, str] = {}
    if logging.wandb_project or logging.log_to:
        flags = {flag: value_text(value) for flag, value in config.flat().items() if flag in flag_table()}
    flags_of_tags = {field.name for field in fields(TagChoices)} & {field.name for field in fields(logging)}
    choices = TagChoices(
        **{name: getattr(logging, name) for name in flags_of_tags},
        world_size=environment.world_size,
        device=environment.device,
    )
    if logging.tensorboard_dir is not None:
        writers.append(
            tensorboard_log(
                logging.tensorboard_dir,
                choices,
                queue_size=logging.tensorboard_queue_size,
                state=state,
                evaluates_again=_only_evaluates(config, state),
            )
        )
    save = config.checkpoint.save
    folder = Path(save) if save and not is_url(save) else None
    if logging.wandb_project:
        assert logging.wandb_exp_name is not None
        writers.append(
            wandb_log(
                logging.wandb_project,
                choices,
                name=logging.wandb_exp_name,
                entity=logging.wandb_entity,
                save_dir=logging.wandb_save_dir or config.checkpoint.save,
                config=flags,
                id_file=None if folder is None else folder / "wandb_run_id.txt",
                resumed=state.iteration > 0,
            )
        )
    facts = RunFacts(
        name=logging.wandb_exp_name or (Path(save).name if save else None),
        flags=flags,
        folder=folder,
        resumed=state.iteration > 0,
    )
    writers += [tracker_log(service, facts, choices) for service in logging.log_to or ()]
    assert config.training.train_iters is not None
    # Last, so that the files have a line's values before the line is shown.
    style = SHORT if logging.log_style == "short" else MEGATRON_LM
    writers.append(make_display(config.training.train_iters, iteration=state.iteration, style=style))
    return writers
