"""What is wrong with the flags of multi-token prediction, and what would work."""

from collections.abc import Iterator
from typing import Any

from megatron.core.pipeline_parallel.stage_cuts import layout_of


def prediction_problems(config: Any) -> Iterator[str]:
    """A problem for each value that cannot be had. `config` has the fields of TransformerConfig."""
    if (config.mtp_num_layers or 0) < 0:
        yield "{mtp_num_layers} must be at least 0"
    if config.mtp_loss_scaling_factor is None or config.mtp_loss_scaling_factor < 0:
        yield "{mtp_loss_scaling_factor} must be at least 0"
    if config.mtp_standalone and not predicts_apart(config):
        yield (
            "{mtp_standalone}: the layers of {mtp_num_layers:name} have a stage of their own where "
            "{pipeline_model_parallel_layout:name} says so, as Et|t|m|L; write that, and drop this"
        )


def predicts_apart(config: Any) -> bool:
    """The layers of multi-token prediction have a pipeline stage of their own: only a layout says so."""
    try:
        stages = layout_of(config)
    except ValueError:  # no layout, of which others speak
        return False
    return stages is not None and any(stage and not stage.strip("m") for stage in stages)
