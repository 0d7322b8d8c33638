"""What a script gives to `pretrain`: functions that build the model, the data and the forward step of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.pipeline_parallel.stages import decoder_ranks, encoder_ranks
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.timers import Timers
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
    chunks = [stages.stage_at(pipeline_rank, number) for number in range(stages.chunks)]
    several = len(chunks) > 1
    readers, writers = encoder_ranks(config.transformer), decoder_ranks(config.transformer)
    stacks = {"add_encoder": pipeline_rank in readers, "add_decoder": pipeline_rank in writers}
    if not config.transformer.num_encoder_layers:
        stacks = {}
    return [
        Stage(each.embedding, each.loss, number if several else None, **stacks) for number, each in enumerate(chunks)
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
    build_datasets: Callable[[Context, SampleCounts], Sequence[object]]
    """Returns the datasets of the train, valid and test split; None for an empty split."""
    build_forward_step: Callable[[Context], ForwardStep]
    build_optimizer: Callable[[Context, Sequence[nn.Module]], object] | None = None
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
    own_vocabulary: bool = False
    """Whether `build_model` decides about the size of the vocabulary, so that checkpoints may differ from the
    tokenizer's."""
    cuts_shared_batches: bool = False
    """Whether the forward step cuts each batch over `batch.local_cp_size` ranks, for --hybrid-context-parallel."""
    publication: Publication = field(default_factory=Publication)
    """Is told of the run, for code that is not handed it."""
