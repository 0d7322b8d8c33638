"""Which layers each pipeline stage has."""

from dataclasses import dataclass

from megatron.core.config_fields import flag, not_a_flag

_PIPELINE = "pipeline_model_parallel_size"


@dataclass(kw_only=True)
class StageConfig:
    """Uneven cuts of the stack of layers, and models whose layers differ."""

    num_layers_in_first_pipeline_stage: int | None = flag(
        None, on="--decoder-first-pipeline-num-layers", only_with=_PIPELINE
    )
    """Layers of the first pipeline stage; an even share when not given."""

    num_layers_in_last_pipeline_stage: int | None = flag(
        None, on="--decoder-last-pipeline-num-layers", only_with=_PIPELINE
    )
    """Layers of the last pipeline stage; an even share when not given."""

    pipeline_model_parallel_layout: str | list[str] | None = flag(None, parse=str, only_with=_PIPELINE)
    """What stands on each stage, such as Et*3|(tt|)*29,m|L: E embedding, t layer, m multi-token prediction, L loss."""

    account_for_embedding_in_pipeline_split: bool = flag(False, only_with=_PIPELINE)
    """Count the embedding as a layer when stages are cut."""

    account_for_loss_in_pipeline_split: bool = flag(False, only_with=_PIPELINE)
    """Count the loss as a layer when stages are cut."""

    heterogeneous_block_specs: bool = not_a_flag(False)
    """Layers differ from each other by a table."""

    hetereogenous_dist_checkpoint: bool = not_a_flag(False)
    """Checkpoints of such models keep layers apart. (The name is spelled as published.)"""
