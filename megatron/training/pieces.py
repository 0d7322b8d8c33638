"""What a script hands to `pretrain`: how to build the model, the data and the step of a run."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.initialize import Environment
from megatron.training.state import TrainState

if TYPE_CHECKING:
    from megatron.training.tokenizer.base import Tokenizer

LossFunction = Callable[..., Any]
ForwardStep = Callable[[Any, nn.Module], tuple[Tensor, LossFunction]]
"""Takes the next micro-batch of an iterator (`StepData`) through the model; returns the output and the function that
makes a loss of it."""


@dataclass(frozen=True)
class Context:
    """What the pieces of a run may look at."""

    config: PretrainConfig
    environment: Environment
    tokenizer: "Tokenizer"
    state: TrainState


@dataclass(frozen=True)
class SampleCounts:
    """Samples that a run asks of each split; None: as many as there are, once."""

    train: int
    valid: int | None
    test: int | None


@dataclass(frozen=True)
class Stage:
    """Which part of the model a chunk is: all of it without pipeline parallelism."""

    pre_process: bool = True
    post_process: bool = True
    virtual: int | None = None


@dataclass(frozen=True)
class Pieces:
    """The pieces of a run."""

    build_model: Callable[[Context, Stage], nn.Module]
    build_datasets: Callable[[Context, SampleCounts], Sequence[Any]]
    """The data sets of the train, valid and test split; None for one that is empty."""
    build_forward_step: Callable[[Context], ForwardStep]
    build_optimizer: Callable[[Context, Sequence[nn.Module]], Any] | None = None
    """A torch.optim.Optimizer, or one of get_megatron_optimizer, over the model chunks; None: what the flags say."""


def pieces_of_user_script(
    datasets_provider: Callable[..., Sequence[Any]],
    model_provider: Callable[..., nn.Module],
    forward_step_func: ForwardStep,
    optimizer_provider: Callable[..., Any] | None = None,
) -> Pieces:
    """The published provider functions, which read `get_args()` for themselves, as pieces.

    A provider gets those of the published keywords that its signature takes, so scripts of several releases work.
    """

    def build_model(context: Context, stage: Stage) -> nn.Module:
        offered = {
            "pre_process": stage.pre_process,
            "post_process": stage.post_process,
            "vp_stage": stage.virtual,
            "config": context.config.transformer,
            "pg_collection": context.environment.groups,
        }
        return model_provider(**accepted(model_provider, offered))

    def build_datasets(context: Context, counts: SampleCounts) -> Sequence[Any]:
        return datasets_provider([counts.train, counts.valid, counts.test])

    def build_optimizer(context: Context, model: Sequence[nn.Module]) -> Any:
        assert optimizer_provider is not None
        offered = {"config": context.config.optimizer, "pg_collection": context.environment.groups}
        return optimizer_provider(list(model), **accepted(optimizer_provider, offered))

    return Pieces(
        build_model,
        build_datasets,
        lambda context: forward_step_func,
        build_optimizer if optimizer_provider is not None else None,
    )


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the offered keywords that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}
