"""Which part of a model stands on which pipeline stage.

A model is cut into `pipeline_size * chunks` stages in the order of its layers. Every rank of a pipeline holds `chunks`
of them. All who need to know (models, groups, schedules, checkpoints, the dry run) ask the one `StageMap`.
"""

from dataclasses import dataclass
from typing import Any

from megatron.core.config_fields import refuse
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.stage_checks import stage_problems
from megatron.core.pipeline_parallel.stage_cuts import AUTO, Pipeline, letters_of_stages, pipeline_of, virtual_stages

__all__ = [
    "Pipeline",
    "StageMap",
    "StagePart",
    "embedding_ranks",
    "pipeline_of",
    "prediction_stage",
    "stage_map",
    "stage_problems",
    "states_into_stages",
    "virtual_stages",
]


@dataclass(frozen=True)
class StagePart:
    """What stands on one stage."""

    stage: int
    """Its place in the order of the model, from 0."""
    layers: range
    """Numbers of its transformer layers, counted over the whole model from 1; may be empty."""
    embedding: bool
    loss: bool
    """It has the last norm, the head and the loss."""
    prediction_layers: int = 0
    """Layers of multi-token prediction."""


@dataclass(frozen=True)
class StageMap(Pipeline):
    """A pipeline whose stages are known: made by `stage_map`."""

    parts: tuple[StagePart, ...] = ()
    """In the order of the stages."""

    def part(self, pp_rank: int, chunk: int = 0) -> StagePart:
        """What stands on a chunk of a rank."""
        return self.parts[self.stage(pp_rank, chunk)]


def stage_map(config: Any) -> StageMap:
    """The stages of the model that a TransformerConfig describes.

    Raises UserError, naming fields and values that would work, where its layers cannot be cut as it says, and for the
    layout `auto` as long as `stage_costs.resolve_auto_layout` has not put the stages in its place.
    """
    refuse(stage_problems(config), config)
    if config.pipeline_model_parallel_layout == AUTO and config.pipeline_model_parallel_size > 1:
        raise UserError(
            "pipeline_model_parallel_layout auto needs the sequence length and the vocabulary: call "
            "megatron.core.transformer.stage_costs.resolve_auto_layout(config, seq_length, vocab_size) first"
        )
    pipeline = pipeline_of(config)
    parts, first = [], 1
    for stage, letters in enumerate(letters_of_stages(config, pipeline)):
        layers = range(first, first + letters.count("t"))
        parts.append(StagePart(stage, layers, "E" in letters, "L" in letters, letters.count("m")))
        first = layers.stop
    return StageMap(pipeline.pipeline_size, pipeline.chunks, pipeline.v_shaped, tuple(parts))


def prediction_stage(config: Any) -> int | None:
    """The stage that has the layers of multi-token prediction; None where the model has none."""
    if not config.mtp_num_layers:
        return None
    letters = letters_of_stages(config, pipeline_of(config))
    return next(stage for stage, held in enumerate(letters) if "m" in held)


def embedding_ranks(config: Any, shared_with_head: bool) -> list[int]:
    """Pipeline ranks that hold the embedding of words, ascending: those of the first stage, of the stage that predicts
    further ahead, and, if they share it, of the head."""
    pipeline, predicts = pipeline_of(config), prediction_stage(config)
    stages = {0} | ({pipeline.num_stages - 1} if shared_with_head else set())
    stages |= set() if predicts is None else {predicts}
    return sorted({pipeline.place(stage)[0] for stage in stages})


def states_into_stages(config: Any, pipeline: Pipeline) -> tuple[int, ...]:
    """How many hidden states each stage gets from the one before for every token: behind the stage that predicts
    further ahead, those of the decoder and of each depth."""
    predicts = prediction_stage(config) if pipeline.num_stages > 1 else None
    beside = getattr(config, "mtp_num_layers", None) or 0
    return tuple(
        1 + (beside if predicts is not None and stage > predicts else 0) for stage in range(pipeline.num_stages)
    )
