"""Which part of a model stands on which pipeline stage, and on which rank a stage lies: integers, no communication.

A model is cut into `pipeline_size * chunks` stages in the order of its layers. Every rank of a pipeline holds `chunks`
of them. All who need to know (models, groups, schedules, checkpoints, the dry run) ask the one `StageMap`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.config_fields import refuse
from megatron.core.exceptions import UserError
from megatron.core.flag_grammars import pipeline_layout

AUTO = "auto"
"""The layout that `balance.settle_layout` replaces by the stages it finds."""


@dataclass(frozen=True)
class Pipeline:
    """How stages lie on the ranks of a pipeline.

    Chunk c of rank r is stage c * pipeline_size + r. In a V-shaped pipeline of two chunks the second chunks come back
    from the last rank to the first: rank r has the stages r and 2 * pipeline_size - 1 - r.
    """

    pipeline_size: int
    chunks: int = 1
    v_shaped: bool = False

    def __post_init__(self) -> None:
        assert self.pipeline_size >= 1 and self.chunks >= 1 and (not self.v_shaped or self.chunks == 2), self

    @property
    def num_stages(self) -> int:
        return self.pipeline_size * self.chunks

    def stage(self, pp_rank: int, chunk: int = 0) -> int:
        """The stage that is this chunk of a rank."""
        assert 0 <= pp_rank < self.pipeline_size and 0 <= chunk < self.chunks, (self, pp_rank, chunk)
        if self.v_shaped and chunk == 1:
            return self.num_stages - 1 - pp_rank
        return chunk * self.pipeline_size + pp_rank

    def place(self, stage: int) -> tuple[int, int]:
        """(pipeline rank, chunk) of a stage."""
        assert 0 <= stage < self.num_stages, (self, stage)
        chunk, rank = divmod(stage, self.pipeline_size)
        return (self.pipeline_size - 1 - rank if self.v_shaped and chunk == 1 else rank), chunk

    @property
    def embedding_rank(self) -> int:
        """The pipeline rank that has the first stage."""
        return self.place(0)[0]

    @property
    def loss_rank(self) -> int:
        """The pipeline rank that has the last stage."""
        return self.place(self.num_stages - 1)[0]


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
    layout `auto` as long as `balance.settle_layout` has not put the stages in its place.
    """
    refuse(stage_problems(config), config)
    if config.pipeline_model_parallel_layout == AUTO and config.pipeline_model_parallel_size > 1:
        raise UserError(
            "pipeline_model_parallel_layout auto needs the sequence length and the vocabulary: call "
            "megatron.core.pipeline_parallel.balance.settle_layout(config, seq_length, vocab_size) first"
        )
    pipeline = pipeline_of(config)
    parts, first = [], 1
    for stage, letters in enumerate(_letters(config, pipeline)):
        layers = range(first, first + letters.count("t"))
        parts.append(StagePart(stage, layers, "E" in letters, "L" in letters, letters.count("m")))
        first = layers.stop
    return StageMap(pipeline.pipeline_size, pipeline.chunks, pipeline.v_shaped, tuple(parts))


def pipeline_of(config: Any) -> Pipeline:
    """How the stages of a config lie on ranks, whatever stands on them."""
    size = config.pipeline_model_parallel_size
    if config.pipeline_schedule == "zb-v" and size > 1:
        return Pipeline(size, 2, v_shaped=True)
    chunks = config.virtual_pipeline_model_parallel_size or 1
    layout = _layout(config)
    return Pipeline(size, len(layout) // size if layout is not None else chunks)


def virtual_stages(config: Any, layers_per_virtual_stage: int) -> int:
    """Chunks of a rank, where each is to have so many layers: the even share of a rank divided by that, rounded up."""
    counted = config.num_layers + _counted_as_layers(config)
    return max(1, -(-counted // (config.pipeline_model_parallel_size * layers_per_virtual_stage)))


# ---------------------------------------------------------------------------------------------------------------------
# What stands on the stages, as letters: E embedding, t layer, m multi-token prediction, L loss


def _letters(config: Any, pipeline: Pipeline) -> list[str]:
    layout = _layout(config)
    if layout is not None:
        return layout
    stages = ["t" * count for count in _layers_of_stages(config, pipeline)]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * (config.mtp_num_layers or 0) + "L"
    return stages


def _layout(config: Any) -> list[str] | None:
    """The stages that are written down; None where they are cut by number. Raises ValueError for what is no layout."""
    layout = config.pipeline_model_parallel_layout
    if layout is None or layout == AUTO or config.pipeline_model_parallel_size == 1:
        return None
    return pipeline_layout(layout if isinstance(layout, str) else "|".join(map(_stage_of_list, layout)))


_PUBLISHED_NAMES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _stage_of_list(stage: Any) -> str:
    """A stage of a layout that is a list: letters, or a list of names."""
    return stage if isinstance(stage, str) else "".join(_PUBLISHED_NAMES.get(name, "?") for name in stage)


def _layers_of_stages(config: Any, pipeline: Pipeline) -> list[int]:
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    if pipeline.num_stages == 1:
        return [config.num_layers]
    if first is None and last is None:
        counts = [(config.num_layers + _counted_as_layers(config)) // pipeline.num_stages] * pipeline.num_stages
        counts[0] -= config.account_for_embedding_in_pipeline_split
        counts[-1] -= config.account_for_loss_in_pipeline_split
        return counts
    ranks = pipeline.pipeline_size
    middle = config.num_layers - (first or 0) - (last or 0)
    of_ranks = [middle // _middle_ranks(config)] * ranks if _middle_ranks(config) else [0] * ranks
    of_ranks[0] = of_ranks[0] if first is None else first
    of_ranks[-1] = of_ranks[-1] if last is None else last
    return [of_ranks[pipeline.place(stage)[0]] // pipeline.chunks for stage in range(pipeline.num_stages)]


def _counted_as_layers(config: Any) -> int:
    return config.account_for_embedding_in_pipeline_split + config.account_for_loss_in_pipeline_split


def _middle_ranks(config: Any) -> int:
    """Ranks whose number of layers is not given."""
    given = (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage)
    return config.pipeline_model_parallel_size - sum(count is not None for count in given)


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong


def stage_problems(config: Any) -> Iterator[str]:
    """A problem for each reason why the layers cannot be cut so. `config` has the fields of TransformerConfig."""
    if config.pipeline_model_parallel_size < 1 or (config.num_layers or 0) < 1:
        return  # others speak of that
    if config.pipeline_model_parallel_size == 1 and (config.virtual_pipeline_model_parallel_size or 1) == 1:
        return  # one stage has it all
    yield from _schedule_problems(config)
    if config.pipeline_model_parallel_layout is not None:
        yield from _exclusive_with_layout(config)
        if config.pipeline_model_parallel_layout != AUTO:
            yield from _layout_problems(config)
    elif config.num_layers_in_first_pipeline_stage is None and config.num_layers_in_last_pipeline_stage is None:
        yield from _even_problems(config)
    else:
        yield from _uneven_problems(config)


def _schedule_problems(config: Any) -> Iterator[str]:
    schedule, chunks = config.pipeline_schedule, config.virtual_pipeline_model_parallel_size or 1
    if schedule == "zb-v" and chunks not in (1, 2):
        yield "{pipeline_schedule} has two chunks a rank; leave {virtual_pipeline_model_parallel_size} out"
    if schedule in ("1f1b", "zb-h1") and chunks > 1:
        yield (
            "{pipeline_schedule} has one chunk a rank, {virtual_pipeline_model_parallel_size} asks for more; "
            "{pipeline_schedule:name} interleaved runs them"
        )
    if schedule == "interleaved" and chunks == 1 and config.pipeline_model_parallel_layout is None:
        yield "{pipeline_schedule} needs {virtual_pipeline_model_parallel_size:name} of 2 or more chunks a rank"


def _exclusive_with_layout(config: Any) -> Iterator[str]:
    for name in (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):
        if getattr(config, name) not in (None, False):
            yield f"{{{name}}} does not go with {{pipeline_model_parallel_layout}}, which says all; give one of the two"


def _layout_problems(config: Any) -> Iterator[str]:
    try:
        stages = _layout(config)
    except ValueError as error:
        yield f"{{pipeline_model_parallel_layout}}: {str(error).replace('{', '{{').replace('}', '}}')}"
        return
    assert stages is not None
    size, letters, complaint = config.pipeline_model_parallel_size, "".join(stages), "{pipeline_model_parallel_layout}"
    chunks = config.virtual_pipeline_model_parallel_size or 1
    v_shaped = config.pipeline_schedule == "zb-v"
    expected = 2 * size if v_shaped else size * chunks
    if len(stages) % size:
        below = len(stages) // size * size
        near = f"{below} or {below + size}" if below else f"{size}"
        yield f"{complaint} has {len(stages)} stages for {{pipeline_model_parallel_size}}; {near} stages would do"
    elif (v_shaped or chunks > 1) and len(stages) != expected:
        yield f"{complaint} has {len(stages)} stages, {size} ranks of {expected // size} chunks have {expected}"
    if letters.count("E") != 1 or not letters.startswith("E"):
        yield f"{complaint} must begin with E, the embedding, and have one"
    if letters.count("L") != 1 or not letters.endswith("L"):
        yield f"{complaint} must end with L, the loss, and have one"
    if letters.count("t") != config.num_layers:
        yield f"{complaint} has {letters.count('t')} layers, {{num_layers}}"
    yield from _prediction_problems(config, stages)


def _prediction_problems(config: Any, stages: list[str]) -> Iterator[str]:
    """Layers of multi-token prediction stand together, behind every transformer layer."""
    wanted, letters, complaint = config.mtp_num_layers or 0, "".join(stages), "{pipeline_model_parallel_layout}"
    if letters.count("m") != wanted:
        yield f"{complaint} has {letters.count('m')} multi-token prediction layers (m), the model has {wanted}"
    elif wanted and ("m" in letters[: letters.rindex("t")] or sum("m" in stage for stage in stages) > 1):
        yield f"{complaint} must have its multi-token prediction layers (m) in one stage, after the last t"


_ELSE = "{num_layers_in_first_pipeline_stage:name}, {num_layers_in_last_pipeline_stage:name} or "
_ELSE += "{pipeline_model_parallel_layout:name} cut unevenly"


def _even_problems(config: Any) -> Iterator[str]:
    stages, extra = pipeline_of(config).num_stages, _counted_as_layers(config)
    counted = config.num_layers + extra
    if counted % stages:
        below = counted // stages * stages - extra
        near = f"{below} or {below + stages}" if below > 0 else f"{below + stages}"
        beside = {0: "", 1: ", with what is counted as a layer,", 2: ", with the two that are counted as layers,"}[
            extra
        ]
        yield f"{{num_layers}}{beside} do not divide by {stages} pipeline stages; {near} layers do, and {_ELSE}"


def _uneven_problems(config: Any) -> Iterator[str]:
    if _counted_as_layers(config):
        yield (
            "{account_for_embedding_in_pipeline_split:name} and {account_for_loss_in_pipeline_split:name} cut evenly; "
            "drop them or the numbers of layers of the first and last stage"
        )
    pipeline, middle = pipeline_of(config), _middle_ranks(config)
    if pipeline.v_shaped:
        yield (
            "{pipeline_schedule} has the first and the last stage on one rank; say what stands where with "
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
            yield f"{{{name}}} does not divide by the {pipeline.chunks} chunks of a rank; {near} does"
    rest = config.num_layers - sum(getattr(config, name) for name in given)
    named = " and ".join(f"{{{name}}}" for name in given)
    each = middle * pipeline.chunks
    if rest < 0 or (middle == 0 and rest != 0):
        yield f"{named} do not fit {{num_layers}}: {-rest if rest < 0 else rest} too {'many' if rest < 0 else 'few'}"
    elif middle and rest % each:
        yield (
            f"{named} leave {rest} of {{num_layers}} to {middle} ranks of {pipeline.chunks} chunks, which does not come "
            f"out even; {rest // each * each} or {rest // each * each + each} would"
        )
