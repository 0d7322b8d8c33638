"""Cuts layers into pipeline stages, and assigns stages to ranks. Integers only, no communication.

A model is cut into `pipeline_size * chunks` stages, in the order of its layers. Each rank of a pipeline holds `chunks`
of them. `Pipeline` assigns stages to ranks; the functions below read from a config which layers are on which stage.
They expect a config without `stage_map.stage_problems`; `stage_map.stage_map` checks that and returns all stages.

An encoder-decoder model (`num_encoder_layers`) has the stages of its encoder first, then those of its decoder. The
decoder's stages pass on the encoder's output together with the decoder's hidden states, because every decoder layer
attends to it.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.declarations.flag_grammars import pipeline_layout

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

AUTO = "auto"
"""Value of `pipeline_model_parallel_layout` that lets `layer_costs.stages_of_auto_layout` choose the stages."""


@dataclass(frozen=True)
class Pipeline:
    """The assignment of stages to the ranks of a pipeline.

    Chunk c of rank r is stage c * pipeline_size + r. A V-shaped pipeline has two chunks on each rank, and its second
    half of stages runs from the last rank back to the first: rank r has the stages r and 2 * pipeline_size - 1 - r.
    """

    pipeline_size: int
    chunks: int = 1
    """Model chunks (stages) on each rank."""
    v_shaped: bool = False

    def __post_init__(self) -> None:
        assert self.pipeline_size >= 1 and self.chunks >= 1 and (not self.v_shaped or self.chunks == 2), self

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks together."""
        return self.pipeline_size * self.chunks

    def stage_index(self, pp_rank: int, chunk: int = 0) -> int:
        """Returns the index of the stage that is this chunk of a pipeline rank."""
        assert 0 <= pp_rank < self.pipeline_size and 0 <= chunk < self.chunks, (self, pp_rank, chunk)
        if self.v_shaped and chunk == 1:
            return self.num_stages - 1 - pp_rank
        return chunk * self.pipeline_size + pp_rank

    def locate(self, stage: int) -> tuple[int, int]:
        """Returns (pipeline rank, chunk) of a stage."""
        assert 0 <= stage < self.num_stages, (self, stage)
        chunk, rank = divmod(stage, self.pipeline_size)
        return (self.pipeline_size - 1 - rank if self.v_shaped and chunk == 1 else rank), chunk

    @property
    def embedding_rank(self) -> int:
        """The pipeline rank that holds the first stage."""
        return self.locate(0)[0]

    @property
    def loss_rank(self) -> int:
        """The pipeline rank that holds the last stage."""
        return self.locate(self.num_stages - 1)[0]


def pipeline_of(config: "TransformerConfig") -> Pipeline:
    """Returns how the stages of a config are assigned to ranks."""
    size = config.pipeline_model_parallel_size
    if config.pipeline_schedule == "zb-v" and size > 1:
        return Pipeline(size, 2, v_shaped=True)
    chunks = config.virtual_pipeline_model_parallel_size or 1
    layout = layout_of(config)
    return Pipeline(size, len(layout) // size if layout is not None else chunks)


def virtual_stages(config: "TransformerConfig", layers_per_virtual_stage: int) -> int:
    """Returns the number of chunks on each rank with which every chunk has this many layers: the even share of a rank
    divided by `layers_per_virtual_stage`, rounded up."""
    counted = config.num_layers + counted_as_layers(config)
    return max(1, -(-counted // (config.pipeline_model_parallel_size * layers_per_virtual_stage)))


# ---------------------------------------------------------------------------------------------------------------------
# The modules on each stage, as letters: E embedding, t transformer layer, m multi-token prediction layer, L loss. The
# second E of an encoder-decoder model begins its decoder.


def letters_of_stages(config: "TransformerConfig", pipeline: Pipeline) -> list[str]:
    """Returns the letters of each stage."""
    layout = layout_of(config)
    if layout is not None:
        return layout
    split = decoder_stage(config)
    if split is not None and pipeline.num_stages > 1:
        counts = _even_layers(num_encoder_layers(config), split)
        counts += _even_layers(config.num_layers, pipeline.num_stages - split)
    else:
        counts = [num_encoder_layers(config) + count for count in _layers_of_stages(config, pipeline)]
    stages = ["t" * count for count in counts]
    for first in {0, split or 0}:
        stages[first] = "E" + stages[first]
    stages[-1] += "m" * (config.mtp_num_layers or 0) + "L"
    return stages


def layout_of(config: "TransformerConfig") -> list[str] | None:
    """Returns the letters of each stage as `pipeline_model_parallel_layout` gives them; None if the number of layers
    decides. Raises ValueError for a layout that cannot be parsed."""
    layout = config.pipeline_model_parallel_layout
    if layout is None or layout == AUTO or config.pipeline_model_parallel_size == 1:
        return None
    if not isinstance(layout, str | list | tuple):
        raise ValueError(f"{layout!r} is not a layout; it is a string such as Et*3|tt|ttL, or a list of stages")
    return pipeline_layout(layout) if isinstance(layout, str) else letters_of_list(layout)


def letters_of_list(layout: Sequence[object]) -> list[str]:
    """Returns the letters of each stage of a layout that is given as a list. Raises ValueError if it cannot be
    parsed."""
    return pipeline_layout("|".join(map(_stage_of_list, layout)))


MEGATRON_LM_NAMES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Megatron-LM's names of the contents of a stage, and the letters that stand for them."""


def _stage_of_list(stage: object) -> str:
    """Returns the letters of a stage that a list layout gives as letters or as Megatron-LM's names. Raises ValueError
    for anything else."""
    if isinstance(stage, str):
        return stage
    if not isinstance(stage, list | tuple):
        raise ValueError(f"{stage!r} is not a stage; a stage is a string of letters such as Et, or a list of names")
    for name in stage:
        if not isinstance(name, str) or name not in MEGATRON_LM_NAMES:
            names = ", ".join(MEGATRON_LM_NAMES)
            raise ValueError(f"{name!r} in the stage {list(stage)!r} is not one of {names}")
    return "".join(MEGATRON_LM_NAMES[name] for name in stage)


def _even_layers(layers: int, stages: int) -> list[int]:
    return [layers // stages] * stages


def decoder_stage(config: "TransformerConfig") -> int | None:
    """Returns the index of the stage on which the decoder of an encoder-decoder model begins; None for other models.

    A layout says which stage; otherwise `pipeline_model_parallel_split_rank` does. By default the two stacks have
    stages in proportion to their layers, at least one each. With one stage it is stage 0.
    """
    encoder = num_encoder_layers(config)
    if not encoder:
        return None
    size, layout = config.pipeline_model_parallel_size, layout_of(config)
    if size == 1:
        return 0
    if layout is not None:
        return next((stage for stage, letters in enumerate(layout) if stage and "E" in letters), 0)
    if config.pipeline_model_parallel_split_rank is not None:
        return int(config.pipeline_model_parallel_split_rank)
    return min(size - 1, max(1, round(size * encoder / (encoder + config.num_layers))))


def num_encoder_layers(config: "TransformerConfig") -> int:
    """Returns the number of layers of the encoder of an encoder-decoder model; 0 for a model with one stack."""
    return getattr(config, "num_encoder_layers", None) or 0


def _layers_of_stages(config: "TransformerConfig", pipeline: Pipeline) -> list[int]:
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
    per_rank = [middle // middle_ranks(config)] * ranks if middle_ranks(config) else [0] * ranks
    per_rank[0] = per_rank[0] if first is None else first
    per_rank[-1] = per_rank[-1] if last is None else last
    return [per_rank[pipeline.locate(stage)[0]] // pipeline.chunks for stage in range(pipeline.num_stages)]


def counted_as_layers(config: "TransformerConfig") -> int:
    """Returns how many of the two, embedding and loss, count as a layer when layers are divided evenly."""
    return config.account_for_embedding_in_pipeline_split + config.account_for_loss_in_pipeline_split


def middle_ranks(config: "TransformerConfig") -> int:
    """Returns the number of ranks whose layer count no flag gives."""
    given = (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage)
    return config.pipeline_model_parallel_size - sum(count is not None for count in given)


# ---------------------------------------------------------------------------------------------------------------------
# Questions about stages


def prediction_stage(config: "TransformerConfig") -> int | None:
    """Returns the index of the stage with the multi-token prediction layers; None if the model has none."""
    if not config.mtp_num_layers:
        return None
    letters = letters_of_stages(config, pipeline_of(config))
    return next(stage for stage, contents in enumerate(letters) if "m" in contents)


def embedding_ranks(config: "TransformerConfig", shared_with_head: bool) -> list[int]:
    """Returns the pipeline ranks that hold the word embedding, ascending: the rank of the first stage, of the stage
    with multi-token prediction, of the decoder's first stage, and, with `shared_with_head`, of the output head."""
    pipeline, predicts = pipeline_of(config), prediction_stage(config)
    stages = {0, decoder_stage(config) or 0} | ({pipeline.num_stages - 1} if shared_with_head else set())
    stages |= set() if predicts is None else {predicts}
    return sorted({pipeline.locate(stage)[0] for stage in stages})


def encoder_ranks(config: "TransformerConfig") -> list[int]:
    """Returns the pipeline ranks with layers of the encoder of an encoder-decoder model, ascending."""
    return list(range(decoder_stage(config) or 1))


def decoder_ranks(config: "TransformerConfig") -> list[int]:
    """Returns the pipeline ranks with layers of the decoder, ascending: all ranks of a model without encoder."""
    return list(range(decoder_stage(config) or 0, config.pipeline_model_parallel_size))


@dataclass(frozen=True)
class StatesIn:
    """The number of hidden states per token that a stage receives from the stage before."""

    decoder: int = 1
    """Number per token of the decoder, or of the only stack of a model."""
    encoder: int = 0
    """Number per token of the encoder. They follow after those of the decoder."""


def states_into_stages(config: "TransformerConfig", pipeline: Pipeline) -> tuple[StatesIn, ...]:
    """Returns what each stage receives from the stage before.

    This is one hidden state per token, except after the stage with multi-token prediction: there the hidden states of
    the decoder and of each prediction depth are sent together. In an encoder-decoder model the decoder's first stage
    receives the encoder's states, and its other stages receive them with the decoder's.
    """
    predicts = prediction_stage(config) if pipeline.num_stages > 1 else None
    depths = getattr(config, "mtp_num_layers", None) or 0
    split = decoder_stage(config) if pipeline.num_stages > 1 else None
    return tuple(
        StatesIn(
            decoder=0
            if split is not None and stage <= split
            else 1 + (depths if predicts is not None and stage > predicts else 0),
            encoder=0 if split is None else 1,
        )
        for stage in range(pipeline.num_stages)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Stages of equal cost


def balanced_counts(layers: Sequence[int], first: int, last: int, pipeline: Pipeline) -> list[int]:
    """Returns the number of layers of each stage so that no rank has much more to compute than the others.

    `layers` is the cost of each layer, in any unit; `first` and `last` are the costs of the first and last stage
    without their layers. The slowest rank sets the pace, so the largest load is minimised first, then the sum of
    squared loads of ranks, then of stages, by moving single layers until no move helps. This is optimal if all layers
    cost the same.
    """
    return list(_balanced_counts(tuple(layers), first, last, pipeline))


@functools.lru_cache(maxsize=64)  # a planner asks for the same stages many times
def _balanced_counts(layers: tuple[int, ...], first: int, last: int, pipeline: Pipeline) -> tuple[int, ...]:
    until = [0, *itertools.accumulate(layers)]
    ranks = [pipeline.locate(stage)[0] for stage in range(pipeline.num_stages)]
    counts = _by_share(until, first, last, pipeline.num_stages)
    while True:
        loads = _Loads(counts, until, first, last, ranks)
        # A pair of numbers compares before its list of counts, which breaks ties between equal loads.
        better = min(
            ((loads.after(giver, taker), _moved(counts, giver, taker)) for giver, taker in _moves(counts)),
            default=(loads.now, counts),
        )
        if better[0] >= loads.now:
            return tuple(counts)
        counts = better[1]


class _Loads:
    """What is minimised: the largest load of a rank, the sums of squared loads of ranks and of stages; and what they
    are after a move of one layer, computed from the stages that it changes."""

    def __init__(
        self, counts: Sequence[int], until: Sequence[int], first: int, last: int, ranks: Sequence[int]
    ) -> None:
        self._until, self._ranks = until, ranks
        self._ends = [0, *itertools.accumulate(counts)]
        self._stages = [until[end] - until[start] for start, end in itertools.pairwise(self._ends)]
        self._stages[0] += first
        self._stages[-1] += last
        self._per_rank = [0] * (max(ranks) + 1)
        for rank, load in zip(ranks, self._stages, strict=True):
            self._per_rank[rank] += load
        self._is_uniform = len({end - start for start, end in itertools.pairwise(until)}) <= 1
        squares = (sum(load * load for load in loads) for loads in (self._per_rank, self._stages))
        self.now = (max(self._per_rank), *squares)

    def after(self, giver: int, taker: int) -> tuple[int, ...]:
        """Returns the three numbers after `giver` has given a layer to `taker`, and stages in between have shifted."""
        _, of_ranks, of_stages = self.now
        per_rank = list(self._per_rank)
        for stage, change in self._changes(giver, taker):
            rank, load = self._ranks[stage], self._stages[stage]
            of_stages += (2 * load + change) * change
            of_ranks += (2 * per_rank[rank] + change) * change
            per_rank[rank] += change
        return max(per_rank), of_ranks, of_stages

    def _changes(self, giver: int, taker: int) -> Iterator[tuple[int, int]]:
        """Yields each stage whose load changes, and by how much."""
        if self._is_uniform:
            layer = self._until[1]
            yield giver, -layer
            yield taker, layer
            return
        low, high, shift = (giver, taker, -1) if giver < taker else (taker, giver, 1)
        before = 0  # what the end of the previous stage has shifted over
        for stage in range(low, high + 1):
            end = self._ends[stage + 1]
            moved = self._until[end + shift] - self._until[end] if stage < high else 0
            if moved != before:
                yield stage, moved - before
            before = moved


def _by_share(until: Sequence[int], first: int, last: int, stages: int) -> list[int]:
    """Returns the counts to start from: each stage ends where its share of the total cost ends."""
    total = first + until[-1] + last
    ends = [sum(first + cost <= total * (stage + 1) // stages for cost in until[1:]) for stage in range(stages - 1)]
    return [stop - start for start, stop in itertools.pairwise([0, *ends, len(until) - 1])]


def _moves(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the pairs of a stage that can give a layer and one that can take it."""
    return ((giver, taker) for giver, taker in itertools.permutations(range(len(counts)), 2) if counts[giver])


def _moved(counts: Sequence[int], giver: int, taker: int) -> list[int]:
    moved = list(counts)
    moved[giver] -= 1
    moved[taker] += 1
    return moved
