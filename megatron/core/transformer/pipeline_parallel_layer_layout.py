"""Megatron-LM's class for the layout of pipeline stages."""

from collections.abc import Sequence

from megatron.core.declarations.flag_grammars import pipeline_layout
from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import pp_rank_or_default
from megatron.core.pipeline_parallel.stages import MEGATRON_LM_NAMES, letters_of_list
from megatron.core.transformer.enums import LayerType

_LETTERS = {
    LayerType.embedding: "E",
    LayerType.decoder: "t",
    LayerType.mtp: "m",
    LayerType.loss: "L",
}
_NAMES = {letter: name for name, letter in MEGATRON_LM_NAMES.items()}


class PipelineParallelLayerLayout(list[str]):
    """The contents of each pipeline stage: a list of letters such as ["Et", "tt", "tL"], in the order of the model. It
    can be `TransformerConfig.pipeline_model_parallel_layout`.

    `layout` is text (`Et|tt|tL`), a list of such strings, or a list of lists of names ("embedding", "decoder", "mtp",
    "loss"). Raises UserError for another layout, or if the ranks do not divide its stages.
    """

    def __init__(self, layout: str | Sequence[str | Sequence[str]], pipeline_model_parallel_size: int) -> None:
        if not isinstance(layout, str | Sequence):
            raise UserError(
                f"pipeline_model_parallel_layout {layout!r}: expected a string such as Et*3|tt|ttL, or a list of stages"
            )
        try:
            super().__init__(pipeline_layout(layout) if isinstance(layout, str) else letters_of_list(layout))
        except ValueError as error:
            raise UserError(f"pipeline_model_parallel_layout: {error}") from None
        self.pipeline_model_parallel_size = pipeline_model_parallel_size
        if len(self) % pipeline_model_parallel_size:
            raise UserError(
                f"pipeline_model_parallel_layout has {len(self)} stages, which {pipeline_model_parallel_size} pipeline "
                "ranks cannot share equally"
            )

    @classmethod
    def from_str(cls, layout: str, pipeline_model_parallel_size: int) -> "PipelineParallelLayerLayout":
        """Returns the layout that a text describes."""
        return cls(layout, pipeline_model_parallel_size)

    @staticmethod
    def parse_str_to_list(layout_str: str) -> list[list[str]]:
        """Returns the names in each stage of a layout that is given as text."""
        return [[_NAMES[letter] for letter in stage] for stage in pipeline_layout(layout_str)]

    @property
    def virtual_pipeline_model_parallel_size(self) -> int:
        """Number of stages on each rank."""
        return len(self) // self.pipeline_model_parallel_size

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Returns the number of layers of a type on a stage. `pp_rank` defaults to this rank's."""
        return self[self._index(vp_stage, pp_rank)].count(_LETTERS[layer_type])

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Returns the number of layers of a type before a stage."""
        before = self[: self._index(vp_stage, pp_rank)]
        return sum(stage.count(_LETTERS[layer_type]) for stage in before)

    def get_layer_id_list(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> list[int]:
        """Returns the indices, from 0 over the whole model, of the layers of a type on a stage."""
        first = self.get_layer_offset(layer_type, vp_stage, pp_rank)
        return list(range(first, first + self.get_num_layers_to_build(layer_type, vp_stage, pp_rank)))

    def _index(self, vp_stage: int | None, pp_rank: int | None) -> int:
        rank = pp_rank_or_default(pp_rank)
        return (vp_stage or 0) * self.pipeline_model_parallel_size + rank
