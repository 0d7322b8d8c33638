"""How a config cuts its layers into pipeline stages, and how stages lie on ranks: integers, no communication."""

from dataclasses import dataclass
from typing import Any

from megatron.core.flag_grammars import pipeline_layout

AUTO = "auto"
"""The layout that `stage_costs.resolve_auto_layout` replaces by the stages it finds."""


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


def pipeline_of(config: Any) -> Pipeline:
    """How the stages of a config lie on ranks, whatever stands on them."""
    size = config.pipeline_model_parallel_size
    if config.pipeline_schedule == "zb-v" and size > 1:
        return Pipeline(size, 2, v_shaped=True)
    chunks = config.virtual_pipeline_model_parallel_size or 1
    layout = layout_of(config)
    return Pipeline(size, len(layout) // size if layout is not None else chunks)


def virtual_stages(config: Any, layers_per_virtual_stage: int) -> int:
    """Chunks of a rank, where each is to have so many layers: the even share of a rank divided by that, rounded up."""
    counted = config.num_layers + counted_as_layers(config)
    return max(1, -(-counted // (config.pipeline_model_parallel_size * layers_per_virtual_stage)))


# ---------------------------------------------------------------------------------------------------------------------
# What stands on the stages, as letters: E embedding, t layer, m multi-token prediction, L loss


def letters_of_stages(config: Any, pipeline: Pipeline) -> list[str]:
    """What stands on each stage. The config is one of which `stage_problems` finds nothing wrong."""
    layout = layout_of(config)
    if layout is not None:
        return layout
    stages = ["t" * count for count in _layers_of_stages(config, pipeline)]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * (config.mtp_num_layers or 0) + "L"
    return stages


def layout_of(config: Any) -> list[str] | None:
    """The stages that are written down; None where they are cut by number. Raises ValueError for what is no layout."""
    layout = config.pipeline_model_parallel_layout
    if layout is None or layout == AUTO or config.pipeline_model_parallel_size == 1:
        return None
    return pipeline_layout(layout if isinstance(layout, str) else "|".join(map(_stage_of_list, layout)))


_MEGATRON_LM_NAMES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _stage_of_list(stage: Any) -> str:
    """A stage of a layout that is a list: letters, or a list of names."""
    return stage if isinstance(stage, str) else "".join(_MEGATRON_LM_NAMES.get(name, "?") for name in stage)


def _layers_of_stages(config: Any, pipeline: Pipeline) -> list[int]:
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    if pipeline.num_stages == 1:
        return [config.num_layers]
    if first is None and last is None:
        counts = [(config.num_layers + counted_as_layers(config)) // pipeline.num_stages] * pipeline.num_stages
        counts[0] -= config.account_for_embedding_in_pipeline_split
        counts[-1] -= config.account_for_loss_in_pipeline_split
        return counts
    ranks = pipeline.pipeline_size
    middle = config.num_layers - (first or 0) - (last or 0)
    of_ranks = [middle // middle_ranks(config)] * ranks if middle_ranks(config) else [0] * ranks
    of_ranks[0] = of_ranks[0] if first is None else first
    of_ranks[-1] = of_ranks[-1] if last is None else last
    return [of_ranks[pipeline.place(stage)[0]] // pipeline.chunks for stage in range(pipeline.num_stages)]


def counted_as_layers(config: Any) -> int:
    """How many of embedding and loss count as a layer in an even cut."""
    return config.account_for_embedding_in_pipeline_split + config.account_for_loss_in_pipeline_split


def middle_ranks(config: Any) -> int:
    """Ranks whose number of layers is not given."""
    given = (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage)
    return config.pipeline_model_parallel_size - sum(count is not None for count in given)
