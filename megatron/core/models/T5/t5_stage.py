"""Which layers of a T5 a pipeline stage has."""

from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.p2p_communication import ONE_STATE
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.pipeline_parallel.stages import StatesIn, decoder_stage, states_into_stages
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class T5Part:
    """The layers of a T5 on one pipeline stage."""

    encoder: range | None
    """Numbers of the encoder's layers; None: the stage has no part of the encoder."""
    decoder: range | None
    """Numbers of the decoder's layers; None: the stage has no part of the decoder."""
    encoder_ends: bool = True
    """Whether the stage has the encoder's last layer, and the norm after it."""
    states_in: StatesIn = ONE_STATE
    """Tensors that the stage receives from the previous one."""


def part_of_stage(
    config: TransformerConfig,
    encoder_config: TransformerConfig,
    groups: ProcessGroupCollection,
    add_encoder: bool,
    add_decoder: bool,
) -> T5Part:
    """Returns the layers of this rank's pipeline stage. Raises UserError if the two configs do not say how many layers
    the encoder has."""
    if groups.size("pp") == 1:
        read, written = (range(1, one.num_layers + 1) for one in (encoder_config, config))
        return T5Part(read if add_encoder else None, written if add_decoder else None)
    if config.num_encoder_layers != encoder_config.num_layers:
        raise UserError(
            f"config.num_encoder_layers is {config.num_encoder_layers}, while encoder_config.num_layers is "
            f"{encoder_config.num_layers}; with several pipeline stages make them equal"
        )
    stages, begins = stage_map(config), decoder_stage(config)
    assert begins is not None
    stage = stages.stage_at(groups.rank("pp"))
    states = states_into_stages(config, stages)[stage.index]
    if stage.index < begins:
        return T5Part(stage.encoder_layers, None, stage.index == begins - 1, states)
    return T5Part(None, stage.layers, False, states)
