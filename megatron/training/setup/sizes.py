"""Sizes of a run that follow from its checkpoint, its data and its vocabulary."""

import dataclasses

from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_costs import stages_of_auto_layout
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.build import padded_vocab_size
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.providers import SampleCounts
from megatron.training.state import TrainState


def with_steps_left(config: PretrainConfig, state: TrainState) -> tuple[PretrainConfig, str]:
    """Returns the config with the iteration in which --train-samples end in a run that continues from `state`, and a
    line about it, empty if it is as the flags say. The flags count it as if all steps had this run's batch sizes; those
    before the checkpoint may have had others."""
    training = config.training
    if training.train_samples is None or not state.iteration:
        return config, ""
    batches = BatchSchedule.from_config(training, config.grid.data, config.data.seq_length)
    last = state.iteration + batches.iterations_of(training.train_samples, state.consumed_train_samples)
    if last == training.train_iters:
        return config, ""
    note = (
        f"--train-samples {training.train_samples} end in iteration {last}: the first {state.iteration} iterations "
        f"had {state.consumed_train_samples} of them"
    )
    return dataclasses.replace(config, training=dataclasses.replace(training, train_iters=last)), note


def check_length(config: PretrainConfig, state: TrainState) -> None:
    """Raises UserError if the run was set up for the length that follows from another checkpoint than the loaded one:
    tensors of the newest were broken, and the older one was saved before the batch size changed."""
    planned, needed = config.training.train_iters, with_steps_left(config, state)[0].training.train_iters
    if planned != needed:
        raise UserError(
            f"the newest checkpoint is broken, and from that of iteration {state.iteration} --train-samples end in "
            f"iteration {needed} instead of {planned}: add --ckpt-step {state.iteration}, or move the broken folder "
            "away"
        )


def vocabulary_rows(config: PretrainConfig, tokenizer: Tokenizer) -> int:
    """Returns the number of rows of the embedding: the vocabulary, padded."""
    vocab_size = config.tokenizer.model_vocab_size(tokenizer.vocab_size)
    tensor = config.transformer.tensor_model_parallel_size
    return padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, tensor)


def resolve_auto_layout(config: PretrainConfig, padded_vocab_size: int) -> tuple[PretrainConfig, list[str]]:
    """Replaces `--pipeline-model-parallel-layout auto` by stages. Returns the config and a line that names them;
    without `auto`, the config as it is and no line."""
    transformer, length = config.transformer, config.data.seq_length
    assert length is not None
    stages = stages_of_auto_layout(
        transformer,
        length,
        padded_vocab_size,
        config.decoder_seq_length,
        bidirectional=config.is_bidirectional,
    )
    if stages is None:
        return config, []
    resolved = dataclasses.replace(transformer, pipeline_model_parallel_layout=stages)
    note = f"--pipeline-model-parallel-layout {transformer.pipeline_model_parallel_layout}: stages {stages}"
    return dataclasses.replace(config, model=dataclasses.replace(config.model, transformer=resolved)), [note]


def samples_to_read(config: PretrainConfig, counts: SampleCounts) -> tuple[int, int | None, int | None]:
    """Returns the number of samples that the run reads of each split; None: all of them (--full-validation)."""
    return (
        (counts.train, None, None) if config.evaluation.full_validation else (counts.train, counts.valid, counts.test)
    )


def sample_counts(config: PretrainConfig, state: TrainState | None = None, fresh: bool | None = None) -> SampleCounts:
    """Returns the number of samples that training and evaluation need of each split. All evaluations read the same
    samples, unless they are `fresh` (None: as --eval-fresh-samples says).

    `state` is that of the checkpoint from which the run continues. Its steps and evaluations may have taken more
    samples than they would with this run's flags. What is left of the run needs samples after those.
    """
    state = state or TrainState()
    training, evaluation = config.training, config.evaluation
    iterations, interval = training.train_iters, evaluation.eval_interval
    rounds = 1 if evaluation.skip_train or not interval else iterations // interval + 1
    batches = BatchSchedule.from_config(training, config.grid.data, config.data.seq_length)
    train = training.train_samples or batches.samples_of(iterations)
    if state.consumed_train_samples != batches.samples_of(state.iteration):
        left = max(0, iterations - state.iteration)
        train = max(train, batches.samples_of(left, state.consumed_train_samples))
    each = evaluation.eval_iters * evaluation.global_batch_size(training)
    if not (evaluation.eval_fresh_samples if fresh is None else fresh):
        return SampleCounts(train, each, each)
    valid = rounds * each
    if state.consumed_valid_samples:
        done = 0 if evaluation.skip_train or not interval else state.iteration // interval
        valid = max(valid, state.consumed_valid_samples + max(1, rounds - done) * each)
    return SampleCounts(train, valid, each)
