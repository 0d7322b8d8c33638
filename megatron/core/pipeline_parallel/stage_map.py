"""Returns the stages of a model as its config describes them, and checks configs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.declarations.config_fields import literal_text, refuse
from megatron.core.declarations.flag_grammars import MOST_LAYERS
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.encoder_decoder import encoder_decoder_problems
from megatron.core.pipeline_parallel.orders import ONE_CHUNK_ORDERS
from megatron.core.pipeline_parallel.stages import (
    AUTO,
    Pipeline,
    counted_as_layers,
    layout_of,
    letters_of_stages,
    middle_ranks,
    num_encoder_layers,
    pipeline_of,
)

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class StageModules:
    """The modules on one pipeline stage."""

    index: int
    """Position of the stage in the order of the model, from 0."""
    layers: range
    """Numbers of its transformer layers, counted over the whole model from 1; may be empty. In an encoder-decoder
    model: numbers of its decoder layers."""
    embedding: bool
    """The stage has the embedding."""
    loss: bool
    """The stage has the final norm, the output head and the loss."""
    prediction_layers: int = 0
    """Number of multi-token prediction layers."""
    encoder_layers: range = range(0)
    """Numbers of its encoder layers, counted over the encoder from 1."""
    stacks: int = 1
    """Number of stacks of layers: 2 in a model with an encoder and a decoder."""


def stages_text(stages: Sequence[StageModules]) -> str:
    """Describes a rank's stages in words: `embedding, layers 1 to 4; layers 17 to 20`."""
    return "; ".join(map(stage_text, stages))


def stage_text(stage: StageModules) -> str:
    """Describes a stage in words."""
    held = ["embedding"] if stage.embedding else []
    for layers, stack in ((stage.encoder_layers, " of the encoder"), (stage.layers, " of the decoder")):
        which = stack if stage.stacks > 1 else ""
        if len(layers) > 1:
            held.append(f"layers {layers.start} to {layers[-1]}{which}")
        elif layers:
            held.append(f"layer {layers.start}{which}")
    if stage.prediction_layers:
        copy = [] if stage.embedding else ["a copy of the embedding"]
        count = stage.prediction_layers
        held += [*copy, f"{count} layer{'s' * (count > 1)} for multi-token prediction"]
    return ", ".join([*held, *(["head and loss"] if stage.loss else [])]) or "nothing"


@dataclass(frozen=True)
class StageMap(Pipeline):
    """A pipeline and the contents of its stages. Made by `stage_map`."""

    stages: tuple[StageModules, ...] = ()
    """In the order of the model."""

    def stage_at(self, pp_rank: int, chunk: int = 0) -> StageModules:
        """Returns the stage that is this chunk of a pipeline rank."""
        return self.stages[self.stage_index(pp_rank, chunk)]


def stage_map(config: "TransformerConfig") -> StageMap:
    """Returns the stages of the model that a TransformerConfig describes.

    Raises UserError, naming fields and values that would work, if the layers cannot be cut as the config says. Raises
    it for the layout `auto` too: replace that by the stages that `layer_costs.stages_of_auto_layout` finds.
    """
    refuse(stage_problems(config), config)
    if config.pipeline_model_parallel_layout == AUTO and config.pipeline_model_parallel_size > 1:
        raise UserError(
            "pipeline_model_parallel_layout auto needs the sequence length and the vocabulary: make the config "
            "with the layout that megatron.core.transformer.layer_costs.stages_of_auto_layout(config, seq_length, "
            "vocab_size) returns"
        )
    pipeline = pipeline_of(config)
    stages, first = [], 1
    encoder = num_encoder_layers(config)
    for index, letters in enumerate(letters_of_stages(config, pipeline)):
        numbers = range(first, first + letters.count("t"))  # counted over both stacks
        layers = range(max(numbers.start - encoder, 1), max(numbers.stop - encoder, 1))
        read = range(min(numbers.start, encoder + 1), min(numbers.stop, encoder + 1)) if encoder else range(0)
        stages.append(
            StageModules(index, layers, "E" in letters, "L" in letters, letters.count("m"), read, 1 + bool(encoder))
        )
        first = numbers.stop
    return StageMap(pipeline.pipeline_size, pipeline.chunks, pipeline.v_shaped, tuple(stages))


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def stage_problems(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each reason why the layers cannot be cut as a TransformerConfig says."""
    if config.pipeline_model_parallel_size < 1 or not 1 <= (config.num_layers or 0) <= MOST_LAYERS:
        return  # reported by other checks
    if config.pipeline_model_parallel_size == 1 and (config.virtual_pipeline_model_parallel_size or 1) == 1:
        return  # one stage has all layers
    yield from _schedule_problems(config)
    if num_encoder_layers(config):
        yield from encoder_decoder_problems(config)
    elif config.pipeline_model_parallel_layout is not None:
        yield from _exclusive_with_layout(config)
        if config.pipeline_model_parallel_layout != AUTO:
            yield from _layout_problems(config)
    elif config.num_layers_in_first_pipeline_stage is None and config.num_layers_in_last_pipeline_stage is None:
        yield from _even_problems(config)
    else:
        yield from _uneven_problems(config)


def _schedule_problems(config: "TransformerConfig") -> Iterator[str]:
    schedule, chunks = config.pipeline_schedule, config.virtual_pipeline_model_parallel_size or 1
    if schedule == "zb-v" and chunks not in (1, 2):
        yield "{pipeline_schedule} has two chunks a rank; leave {virtual_pipeline_model_parallel_size} out"
    if schedule in ONE_CHUNK_ORDERS and chunks > 1:
        yield (
            "{pipeline_schedule} has one chunk a rank, {virtual_pipeline_model_parallel_size} asks for more; "
            "{pipeline_schedule:name} interleaved runs them"
        )
    group, ranks = config.microbatch_group_size_per_vp_stage, config.pipeline_model_parallel_size
    if chunks > 1 and group is not None and group < ranks:
        yield (
            f"{{microbatch_group_size_per_vp_stage}} is less than {{pipeline_model_parallel_size}}: a group "
            f"would be through before its first micro-batch is back; use {ranks} or more"
        )
    if schedule == "interleaved" and chunks == 1 and config.pipeline_model_parallel_layout in (None, AUTO):
        yield "{pipeline_schedule} needs {virtual_pipeline_model_parallel_size:name} of 2 or more chunks a rank"


def _exclusive_with_layout(config: "TransformerConfig") -> Iterator[str]:
    for name in (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):
        if getattr(config, name) not in (None, False):
            yield f"{{{name}}} does not go with {{pipeline_model_parallel_layout}}, which says all; give one of the two"


def _layout_problems(config: "TransformerConfig") -> Iterator[str]:
    try:
        stages = layout_of(config)
    except ValueError as error:
        yield f"{{pipeline_model_parallel_layout}}: {literal_text(str(error))}"
        return
    assert stages is not None
    size, letters, complaint = config.pipeline_model_parallel_size, "".join(stages), "{pipeline_model_parallel_layout}"
    chunks = config.virtual_pipeline_model_parallel_size or 1
    v_shaped = config.pipeline_schedule == "zb-v"
    expected = 2 * size if v_shaped else size * chunks
    if len(stages) % size:
        below = len(stages) // size * size
        near = f"{below} or {below + size}" if below else f"{size}"
        yield f"{complaint} has {len(stages)} stages for {{pipeline_model_parallel_size}}; give {near} stages"
    elif (v_shaped or chunks > 1) and len(stages) != expected:
        yield f"{complaint} has {len(stages)} stages, {size} ranks of {expected // size} chunks have {expected}"
    # The first stage reads tokens and the last one computes the loss, so neither can be empty.
    if letters.count("E") != 1 or not stages[0].startswith("E"):
        yield f"{complaint} must begin with E, the embedding, on its first stage and contain no other E"
    if letters.count("L") != 1 or not stages[-1].endswith("L"):
        yield f"{complaint} must end with L, the loss, on its last stage and contain no other L"
    if letters.count("t") != config.num_layers:
        yield f"{complaint} has {letters.count('t')} layers, {{num_layers}}"
    yield from _prediction_problems(config, stages)


def _prediction_problems(config: "TransformerConfig", stages: list[str]) -> Iterator[str]:
    """Multi-token prediction layers must be on one stage, behind all transformer layers."""
    wanted, letters, complaint = config.mtp_num_layers or 0, "".join(stages), "{pipeline_model_parallel_layout}"
    if letters.count("m") != wanted:
        yield f"{complaint} has {letters.count('m')} multi-token prediction layers (m), the model has {wanted}"
    elif wanted and ("m" in letters[: letters.rindex("t")] or sum("m" in stage for stage in stages) > 1):
        yield f"{complaint} must have its multi-token prediction layers (m) in one stage, after the last t"


_UNEVEN_CUTS = "{num_layers_in_first_pipeline_stage:name}, {num_layers_in_last_pipeline_stage:name} or "
_UNEVEN_CUTS += "{pipeline_model_parallel_layout:name}"


def _even_problems(config: "TransformerConfig") -> Iterator[str]:
    stages, extra = pipeline_of(config).num_stages, counted_as_layers(config)
    counted = config.num_layers + extra
    if counted % stages:
        below = counted // stages * stages - extra
        near = f"{below} or {below + stages}" if below > 0 else f"{below + stages}"
        beside = {0: "", 1: ", with what is counted as a layer,", 2: ", with the two that are counted as layers,"}[
            extra
        ]
        yield (
            f"{{num_layers}}{beside} is not divisible by {stages} pipeline stages; use {near} layers, or cut them "
            f"unevenly with {_UNEVEN_CUTS}"
        )


def _uneven_problems(config: "TransformerConfig") -> Iterator[str]:
    if counted_as_layers(config):
        yield (
            "{account_for_embedding_in_pipeline_split:name} and {account_for_loss_in_pipeline_split:name} cut evenly; "
            "drop them or the numbers of layers of the first and last stage"
        )
    pipeline, middle = pipeline_of(config), middle_ranks(config)
    if pipeline.v_shaped:
        yield (
            "{pipeline_schedule} has the first and the last stage on one rank; give the contents of each stage with "
            "{pipeline_model_parallel_layout:name}"
        )
        return
    given = [
        name
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if getattr(config, name) is not None
    ]
    for name in given:
        count = getattr(config, name)
        if count < 0 or count % pipeline.chunks:
            near = max(0, round(count / pipeline.chunks)) * pipeline.chunks
            yield f"{{{name}}} is not divisible by the {pipeline.chunks} chunks of a rank; use {near}"
    rest = config.num_layers - sum(getattr(config, name) for name in given)
    named = " and ".join(f"{{{name}}}" for name in given)
    each = middle * pipeline.chunks
    if rest < 0 or (middle == 0 and rest != 0):
        yield f"{named} do not fit {{num_layers}}: {-rest if rest < 0 else rest} too {'many' if rest < 0 else 'few'}"
    elif middle and rest % each:
        yield (
            f"{named} leave {rest} of {{num_layers}} to {middle} ranks of {pipeline.chunks} chunks, which is not "
            f"divisible by {each}; leave {rest // each * each} or {rest // each * each + each}"
        )
