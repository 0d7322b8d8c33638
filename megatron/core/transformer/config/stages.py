"""Assignment of layers to pipeline stages."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.declarations.config_fields import flag, not_a_flag
from megatron.core.pipeline_parallel.stages import layout_of

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_PIPELINE = "pipeline_model_parallel_size"


@dataclass(kw_only=True)
class StageConfig:
    """Uneven pipeline stages, and models whose layers differ."""

    num_layers_in_first_pipeline_stage: int | None = flag(
        None, on="--decoder-first-pipeline-num-layers", only_with=_PIPELINE
    )
    """Number of layers of the first pipeline stage. Default: an even share."""

    num_layers_in_last_pipeline_stage: int | None = flag(
        None, on="--decoder-last-pipeline-num-layers", only_with=_PIPELINE
    )
    """Number of layers of the last pipeline stage. Default: an even share."""

    pipeline_model_parallel_layout: str | list[str] | None = flag(
        None, parse=str, only_with=_PIPELINE, from_checkpoint=True
    )
    """Contents of each pipeline stage, separated by |, such as Et*3|(tt|)*29,m|L: E embedding, t transformer layer, m
    multi-token prediction layer, L loss. `auto` finds stages of equal cost."""

    num_encoder_layers: int | None = not_a_flag(None)
    """Layers of the encoder of an encoder-decoder model, whose decoder has `num_layers`; None: the model has one stack
    of layers."""

    pipeline_model_parallel_split_rank: int | None = flag(None, only_with=_PIPELINE)
    """T5: first pipeline stage of the decoder; the stages before it are the encoder's. Default: stages in proportion to
    the layers of the two."""

    account_for_embedding_in_pipeline_split: bool = flag(False, only_with=_PIPELINE)
    """Count the embedding as a layer when stages are cut."""

    account_for_loss_in_pipeline_split: bool = flag(False, only_with=_PIPELINE)
    """Count the loss as a layer when stages are cut."""

    heterogeneous_block_specs: bool = not_a_flag(False)
    """Layers differ from each other, by a table."""

    hetereogenous_dist_checkpoint: bool = not_a_flag(False)
    """Checkpoints of such models store layers separately. (The name is spelled as in Megatron-LM.)"""


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for `mtp_standalone` without a layout that has such a stage; `config` has the fields of
    TransformerConfig. `pipeline_parallel.stage_map.stage_problems` finds all other problems of stages."""
    if config.mtp_standalone and not has_prediction_stage(config):
        yield (
            "{mtp_standalone}: the layers of {mtp_num_layers:name} have a stage of their own where "
            "{pipeline_model_parallel_layout:name} says so, as Et|t|m|L; write that, and drop this"
        )


def has_prediction_stage(config: "TransformerConfig") -> bool:
    """Whether the layers of multi-token prediction have their own pipeline stage, which only a layout can specify."""
    try:
        stages = layout_of(config)
    except ValueError:  # a wrong layout; other checks report it
        return False
    return stages is not None and any(stage and not stage.strip("m") for stage in stages)
