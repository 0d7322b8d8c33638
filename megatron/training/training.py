"""The story of a run, top to bottom: `pretrain`; its loop: `train`; one iteration: `train_step`."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.enums import ModelType
from megatron.core.exceptions import UserError
from megatron.core.optimizer import MegatronOptimizer, StepUpdate
from megatron.core.optimizer.clip_grads import weight_norm
from megatron.training.arguments import config_of_command_line, delay_errors_on_other_ranks
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.dry_run_report import print_dry_run
from megatron.training.hooks.exit import ExitDecision
from megatron.training.hooks.signals import DEFAULT_SIGNALS, SignalWatch
from megatron.training.initialize import Environment, process_environment
from megatron.training.megatron_lm_api import (
    build_train_valid_test_data_iterators as build_train_valid_test_data_iterators,
)
from megatron.training.megatron_lm_api import evaluate as evaluate
from megatron.training.megatron_lm_api import get_model as get_model
from megatron.training.megatron_lm_api import setup_model_and_optimizer as setup_model_and_optimizer
from megatron.training.providers import Providers, providers_of_user_script, warn_unused
from megatron.training.setup import set_up
from megatron.training.trainer import Trainer


@dataclass(frozen=True)
class StepResult:
    """What one iteration gave; everything that was computed is still on the device."""

    reports: Sequence[Mapping[str, Tensor]]
    """The reporting dict of each micro-batch; empty where the loss is not computed."""
    update: StepUpdate
    learning_rate: Tensor | float
    """That this update was made with."""
    loss_scale: Tensor
    params_norm: Tensor | None = None


def pretrain(
    train_valid_test_dataset_provider: Providers | Callable[..., Sequence[Any]],
    model_provider: Callable[..., nn.Module] | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
    forward_step_func: Callable[..., Any] | None = None,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Callable[..., Any] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    non_loss_data_func: Callable[..., Any] | None = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
    *,
    optimizer_provider: Callable[..., Any] | None = None,
) -> None:
    """Train the model that the command line describes, out of the given providers.

    Takes the published provider functions, or a `Providers` alone. `optimizer_provider(model_chunks)` may return any
    torch.optim.Optimizer. Exits with code 2 when the command line is wrong, and with the code of the `ExitDecision`
    when the run ends early because of a non-finite loss. `get_embedding_ranks` and `get_position_embedding_ranks` have
    nothing to choose: which ranks hold an embedding follows from the layout of the stages. Raises UserError for what
    nothing serves yet: the functions of non-loss data, `store`, `inprocess_call_wrapper`.
    """
    started = time.monotonic()
    unserved = {
        "process_non_loss_data_func": process_non_loss_data_func,
        "non_loss_data_func": non_loss_data_func,
        "store": store,
        "inprocess_call_wrapper": inprocess_call_wrapper,
    }
    for name, given in unserved.items():
        if given is not None:
            raise UserError(f"pretrain({name}=...): not yet")
    warn_unused(
        "pretrain",
        {
            "get_embedding_ranks": get_embedding_ranks,
            "get_position_embedding_ranks": get_position_embedding_ranks,
        },
    )
    config = config_of_command_line(extra_args_provider, args_defaults)
    if isinstance(train_valid_test_dataset_provider, Providers):
        providers = train_valid_test_dataset_provider
    else:
        assert model_provider is not None and forward_step_func is not None
        providers = providers_of_user_script(
            train_valid_test_dataset_provider, model_provider, forward_step_func, optimizer_provider
        )
    if config.training.dry_run:
        return print_dry_run(config, providers)
    try:
        decision = run_pretraining(config, providers, started)
    except UserError as error:
        rank = os.environ.get("RANK")
        print(f"error: {error}" if rank is None else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    if decision is not None and decision.exit_code:
        raise SystemExit(decision.exit_code)


def run_pretraining(config: PretrainConfig, providers: Providers, started: float) -> ExitDecision | None:
    """Set up, train, finish; returns why the run ended early, if it did. Everything it started has ended by then."""
    watched = {*DEFAULT_SIGNALS, config.resilience.exit_signal}
    with SignalWatch(sorted(watched)) as signals, process_environment(config) as environment:
        try:
            return set_up_and_train(config, providers, environment, signals, started)
        except UserError:
            delay_errors_on_other_ranks()
            raise


def set_up_and_train(
    config: PretrainConfig, providers: Providers, environment: Environment, signals: SignalWatch, started: float
) -> ExitDecision | None:
    """What `run_pretraining` does among the other ranks."""
    decision = None
    run = set_up(config, providers, environment, signals, started)
    try:
        with signals.training():
            if not config.evaluation.skip_train:
                decision = train(run)
            if decision is None:
                run.finish()
        run.close()
    except BaseException as error:
        run.abandon(error)
        raise
    return decision


def train(run: Trainer) -> ExitDecision | None:
    """Iterate until the last iteration, or until the ranks agree to leave; returns why, if early."""
    state, decision = run.state, None
    if run.is_done() and run.environment.logs:
        print(f"nothing is left to train: iteration {state.iteration} of {run.config.training.train_iters}", flush=True)
    run.log.start(state.iteration)
    run.hooks.on_start(state.iteration)
    while decision is None and not run.is_done():
        run.hooks.before_step(state.iteration)
        run.advance(train_step(run))
        run.hooks.after_step(state.iteration)
        if run.evaluation_is_due():
            run.evaluate("valid")
        decision = run.decide()
        if run.save_is_due(decision):
            run.save()
    if decision is not None:
        run.leave(decision)
    return decision


def train_step(run: Trainer) -> StepResult:
    """One global batch forward and backward, one update. Nothing here waits for the device."""
    for chunk in run.model:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    reports = run.forward_backward(
        forward_step_func=run.forward_step,
        data_iterator=run.splits.train.iterators(len(run.model)),
        model=run.model,
        num_microbatches=run.begin_step(),
        seq_length=run.config.data.seq_length,
        micro_batch_size=run.config.training.micro_batch_size,
        forward_only=False,
        before_micro_batch=run.place_micro_batch,
    )
    learning_rate, loss_scale = learning_rate_of(run.optimizer), run.optimizer.get_loss_scale().clone()
    update = run.optimizer.step_on_device(losses_are_finite(reports, run.device))
    run.scheduler.advance_on_device(update.update_applied, increment=run.batches.global_batch_size)
    return StepResult(reports, update, learning_rate, loss_scale, norm_of_weights(run))


def norm_of_weights(run: Trainer) -> Tensor | None:
    """With --log-params-norm, of all weights after the update, where a log line is due."""
    logging = run.config.logging
    if not logging.log_params_norm or (run.state.iteration + 1) % logging.log_interval:
        return None
    return weight_norm([unit for chunk in run.model for unit in chunk.units], run.environment.groups, run.model[0])


def learning_rate_of(optimizer: MegatronOptimizer) -> Tensor | float:
    """Of the first group, as it is now: a copy on the device, or the number that a plain torch optimizer has. Zero on a
    rank that has no parameters, which prints nothing."""
    if not optimizer.param_groups:
        return 0.0
    rate = optimizer.param_groups[0]["lr"]
    return rate.clone() if isinstance(rate, Tensor) else float(rate)


def losses_are_finite(reports: Sequence[Mapping[str, Tensor]], device: torch.device) -> Tensor:
    """A bool scalar on the device: every loss that this rank reports is finite; so where it reports none."""
    values = [value.detach().reshape(-1).float() for report in reports for value in report.values()]
    if not values:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.isfinite(torch.cat(values)).all()
