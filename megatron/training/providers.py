"""What a script gives to `pretrain`: functions that build the model, the data and the forward step of a run."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.pipeline_parallel.stages import decoder_ranks, encoder_ranks
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.timers import Timers
from megatron.core.utils.keywords import Keywords
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.hooks.hook import Hook
from megatron.training.launch.environment import Environment, Publication
from megatron.training.state import TrainState

if TYPE_CHECKING:
    from megatron.data.tokenizer.base import Tokenizer

LossFunction = Callable[..., Any]
ForwardStep = Callable[[Any, nn.Module], tuple[Tensor, LossFunction]]
"""Runs the model on the next micro-batch of an iterator (`StepData`); returns the output and the function that computes
the loss from it."""


@dataclass(frozen=True)
class Context:
    """The parts of a run that a provider may read."""

    config: PretrainConfig
    environment: Environment
    tokenizer: "Tokenizer"
    state: TrainState
    timers: Timers = field(default_factory=lambda: Timers(0, "max"))
    """Named timers, as --timing-log-level and --timing-log-option say; silent ones by default."""

    @property
    def vocab_size(self) -> int:
        """Entries of the model's vocabulary without padding: the tokenizer's, or more if --vocab-size says so."""
        return self.config.tokenizer.model_vocab_size(self.tokenizer.vocab_size)


@dataclass(frozen=True)
class SampleCounts:
    """Number of samples that a run needs of each split; None: every sample of the split, once."""

    train: int
    valid: int | None
    test: int | None


@dataclass(frozen=True)
class Stage:
    """The part of the model that a chunk holds; without pipeline parallelism the whole model."""

    pre_process: bool = True
    """The chunk has the embedding."""
    post_process: bool = True
    """The chunk has the last norm, the head and the loss."""
    virtual: int | None = None
    """Number of the chunk on its rank; None if a rank holds one chunk."""
    add_encoder: bool = True
    """The chunk has layers of the encoder, if the model has an encoder and a decoder."""
    add_decoder: bool = True
    """The chunk has layers of the decoder, if the model has an encoder and a decoder."""


def stages_of_rank(config: PretrainConfig, pipeline_rank: int) -> list[Stage]:
    """Returns the stages of a pipeline rank, one for each of its model chunks, in the order of chunks."""
    stages = stage_map(config.transformer)
    parts = [stages.stage_at(pipeline_rank, chunk) for chunk in range(stages.chunks)]
    several = len(parts) > 1
    readers, writers = encoder_ranks(config.transformer), decoder_ranks(config.transformer)
    stacks = {"add_encoder": pipeline_rank in readers, "add_decoder": pipeline_rank in writers}
    if not config.transformer.num_encoder_layers:
        stacks = {}
    return [
        Stage(part.embedding, part.loss, number if several else None, **stacks) for number, part in enumerate(parts)
    ]


@dataclass(frozen=True)
class NonLossFunctions:
    """A script's functions for data of an evaluation other than losses, such as texts that the model writes."""

    collect: Callable[[Sequence[nn.Module]], Any] | None = None
    """Megatron-LM's `non_loss_data_func(model)`: returns the data. Every rank calls it, with the model in eval mode.
    None: the data are a list of loss_func(output, non_loss_data=True), one for each micro-batch of the last global
    batch, and empty on ranks without the last stage."""
    process: Callable[[Any, int, Any], None] | None = None
    """Megatron-LM's `process_non_loss_data_func(data, iteration, tensorboard_writer)`, for the rank that logs."""


@dataclass(frozen=True)
class Providers:
    """The functions that build the parts of a run."""

    build_model: Callable[[Context, Stage], nn.Module]
    build_datasets: Callable[[Context, SampleCounts], Sequence[Any]]
    """Returns the datasets of the train, valid and test split; None for an empty split."""
    build_forward_step: Callable[[Context], ForwardStep]
    build_optimizer: Callable[[Context, Sequence[nn.Module]], Any] | None = None
    """Returns an optimizer of the model chunks: a torch.optim.Optimizer, or the result of get_megatron_optimizer. None:
    the optimizer that the flags choose."""
    build_scheduler: Callable[[Context, MegatronOptimizer], OptimizerParamScheduler] | None = None
    """Returns the schedule of learning rate and weight decay. None: the schedule that the flags choose."""
    build_hooks: Callable[[Context], Sequence[Hook]] | None = None
    """Returns hooks, which are called after those that flags add. Every rank must build the same, in the same order."""
    load_first_weights: Callable[[Context, Sequence[nn.Module], MegatronOptimizer], None] | None = None
    """Fills the weights of a new run, before its first step. Every rank calls it, unless a checkpoint was loaded."""
    non_loss: NonLossFunctions | None = None
    """The script's functions for data of evaluations other than losses."""
    use_torch_distributed: bool = False
    """The functions call torch.distributed themselves, so torch.distributed is initialised for one process too."""
    publication: Publication = field(default_factory=Publication)
    """Is told of the run, for code that is not handed it."""


def providers_of_user_script(
    datasets_provider: Callable[..., Sequence[Any]],
    model_provider: Callable[..., nn.Module],
    forward_step_func: ForwardStep,
    optimizer_provider: Callable[..., Any] | None = None,
    non_loss: NonLossFunctions | None = None,
) -> Providers:
    """Adapts Megatron-LM's provider functions, which read `get_args()` themselves, to `Providers`.

    A provider gets only the Megatron-LM keywords that its signature accepts, so scripts of several releases work.
    """

    def build_forward_step(context: Context) -> ForwardStep:
        groups = context.environment.groups
        size, leads = groups.size("cp"), not any(groups.rank(axis) for axis in ("tp", "cp", "dp"))
        return reporting_tensors(forward_step_func, size if leads else 1)

    return Providers(
        model_builder(model_provider),
        datasets_builder(datasets_provider),
        build_forward_step,
        None if optimizer_provider is None else optimizer_builder(optimizer_provider),
        non_loss=non_loss,
        use_torch_distributed=True,
    )


def reporting_tensors(forward_step: ForwardStep, context_parallel_size: int = 1) -> ForwardStep:
    """Returns the forward step of a Megatron-LM script with reports as the app takes them: a tensor of one value, or of
    a sum and a count. A script may also report numbers, scalars, and pairs of them.

    With `context_parallel_size` above 1, prints once how a mean loss is scaled, which releases did differently.
    """

    @functools.wraps(forward_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        output, loss_func = forward_step(*args, **kwargs)
        if loss_func is None:
            return output, None
        return output, functools.partial(_report_tensors, loss_func, context_parallel_size)

    return step


def _report_tensors(loss_func: LossFunction, context_parallel_size: int, output: Tensor, **keywords: Any) -> Any:
    found = loss_func(output, **keywords)
    if keywords.get("non_loss_data"):
        return found
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise UserError(
            f"a loss function returned {type(found).__name__}; it returns (mean loss, report), or (sum of losses, "
            "number of tokens, report)"
        )
    *loss, report = found
    if len(loss) == 1 and context_parallel_size > 1:
        _tell_scaling(context_parallel_size)
    device = loss[0].device
    return (*loss, {name: _report_tensor(name, value, device) for name, value in report.items()})


@functools.cache
def _tell_scaling(size: int) -> None:
    print(
        f"the loss function returns a mean loss, which is multiplied by --context-parallel-size {size} here, as in "
        "Megatron-LM from release 0.14 on; a script of releases 0.5 and 0.6 does so itself and must leave it out",
        flush=True,
    )


def _report_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    parts = value if isinstance(value, tuple | list) else [value]
    tensors = [part if isinstance(part, Tensor) else torch.full((), float(part), device=device) for part in parts]
    wide = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in tensors])
    if flat.numel() not in (1, 2):
        raise UserError(f"the report {name!r} of a loss function has {flat.numel()} values; give one, or sum and count")
    return flat


def model_builder(model_provider: Callable[..., nn.Module]) -> Callable[[Context, Stage], nn.Module]:
    """Adapts Megatron-LM's model provider to `Providers.build_model`. The builder raises UserError for a virtual stage
    if the provider has no parameter `vp_stage`."""

    def build_model(context: Context, stage: Stage) -> nn.Module:
        if stage.virtual is not None and "vp_stage" not in Keywords.of(model_provider):
            raise UserError(
                f"the model provider {getattr(model_provider, '__name__', '')} has no parameter vp_stage, which "
                "distinguishes virtual pipeline stages: add it, or leave out the flags of virtual stages"
            )
        offered = {
            "pre_process": stage.pre_process,
            "post_process": stage.post_process,
            "vp_stage": stage.virtual,
            "config": context.config.transformer,
            "pg_collection": context.environment.groups,
        }
        if context.config.transformer.num_encoder_layers:
            offered |= {"add_encoder": stage.add_encoder, "add_decoder": stage.add_decoder}
        return model_provider(**Keywords.of(model_provider).chosen_from(offered))

    return build_model


def datasets_builder(
    datasets_provider: Callable[..., Sequence[Any]],
) -> Callable[[Context, SampleCounts], Sequence[Any]]:
    """Adapts Megatron-LM's datasets provider to `Providers.build_datasets`."""

    def build_datasets(context: Context, counts: SampleCounts) -> Sequence[Any]:
        stages = stages_of_rank(context.config, context.environment.groups.rank("pp"))
        return datasets_of_provider(datasets_provider, counts, [stage.virtual for stage in stages])

    return build_datasets


def optimizer_builder(optimizer_provider: Callable[..., Any]) -> Callable[[Context, Sequence[nn.Module]], Any]:
    """Adapts an optimizer provider, `optimizer_provider(model_chunks)`, to `Providers.build_optimizer`."""

    def build_optimizer(context: Context, model: Sequence[nn.Module]) -> Any:
        offered = {"config": context.config.optimizer, "pg_collection": context.environment.groups}
        return optimizer_provider(list(model), **Keywords.of(optimizer_provider).chosen_from(offered))

    return build_optimizer


def datasets_of_provider(
    provider: Callable[..., Sequence[Any]], counts: SampleCounts, chunks: Sequence[int | None]
) -> Sequence[Any]:
    """Returns the datasets that Megatron-LM's datasets provider builds on this rank; None for a dataset that it builds
    on other ranks only.

    It is called on every rank, even if it says (`is_distributed`) that the first tensor parallel rank is enough,
    because each rank reads its own data. With virtual stages it is called once for each chunk, as Megatron-LM does; all
    chunks of a rank then read the same datasets, those of the first chunk that got any. A provider without the
    parameter `vp_stage`, as in release 0.14, is called once: it tells pipeline ranks apart, not their chunks.
    """
    asked = [counts.train, counts.valid, counts.test]
    found: list[Any] = [None] * len(asked)
    keywords = Keywords.of(provider)
    for chunk in chunks if "vp_stage" in keywords else [None]:
        given = provider(asked, **keywords.chosen_from({"vp_stage": chunk}))
        found = [one if one is not None else other for one, other in zip(found, given, strict=True)]
    return found


def warn_unused(function: str, given: Mapping[str, Any]) -> None:
    """Prints, on the first rank, which arguments of a function of Megatron-LM have no effect here."""
    for name, value in given.items():
        if value is not None and os.environ.get("RANK", "0") == "0":
            print(
                f"{function}({name}=...) has no effect: the layout of the stages decides which ranks hold an embedding",
                flush=True,
            )
