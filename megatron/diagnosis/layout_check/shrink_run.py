"""Shrinks a run: the same kinds of layers and the same dimensions of the layout, in sizes that any machine can run.

Flags that say what a layer computes, and how it is split over ranks, are kept. Sizes are the smallest that the splits
allow; numbers are float64, data is synthetic, and nothing is saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.exceptions import UserError
from megatron.diagnosis.layout_check.shrink_layout import LayoutSizes, shrink_layout
from megatron.diagnosis.layout_check.shrink_model import ShrunkFlags, fields_of_groups
from megatron.training.config.command_line import kept_words, split_words
from megatron.training.config.conditions import is_to_come
from megatron.training.config.flag_table import GROUPS, flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.retired import translate_all
from megatron.training.inspection.run_description import command_line_of

_PARTS_OF_LAYERS = ("attention", "positions", "mixture of experts", "multi-latent attention", "token mixers")
_MODEL_GROUPS = ("model", *_PARTS_OF_LAYERS, "initial weights", "optimizer")
_LAYOUT_GROUPS = ("number formats, seed and ranks", "data parallel", "memory", "kernels", "pipeline stages")
_MODEL_TOO = {"seed", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"}
_LAYOUT_TOO = {"cp_comm_type", "use_distributed_optimizer", "overlap_param_gather"}
"""Flags that stand among the others in --help."""
_SIZES = {"seq_length", "micro_batch_size", "global_batch_size"}
_FORMATS = {
    "fp16",
    "bf16",
    "fp64",
    "lr",
    "min_lr",
    "decoupled_lr",
    "decoupled_min_lr",
    "loss_scale",
    "attention_backend",
}
_FORMATS |= {"main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"}
"""Flags of the kept groups that do not go with float64, or with a learning rate of our own."""
_OF_DOCUMENTS = {"hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"}
"""Flags of the kept groups that need rows of documents, which made-up data does not have."""


@dataclass
class ShrunkRun:
    """A shrunk run, with its layout and in one process."""

    sizes: LayoutSizes
    words: list[str]
    """Command line of the run under the layout."""
    plain_words: list[str]
    """Command line of the run of one process."""
    notes: list[str] = field(default_factory=list)
    """What differs from the user's flags, one sentence per line."""


def flags_that_matter(flags: Sequence[str]) -> list[str]:
    """Returns a run's command line without flags that the check replaces: data, tokenizer, checkpoints, logs,
    schedules."""
    occurrences, strays = split_words(flags)
    occurrences, _ = translate_all(occurrences)
    groups = {*_MODEL_GROUPS, *_LAYOUT_GROUPS}
    # What is unknown, or not built yet, is left for the command line to be told.
    kept = kept_words(
        occurrences,
        lambda flag: (
            flag is None
            or ((flag.group in groups or flag.field in _MODEL_TOO | _SIZES) and flag.field not in _OF_DOCUMENTS)
            or is_to_come(flag)
        ),
    )
    # A dry run needs no length of training.
    return [*strays, *kept, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--dry-run"]


def flags_of_script(flags: Sequence[str]) -> list[str]:
    """Returns the words of a command line whose flags are a script's own."""
    return kept_words(translate_all(split_words(flags)[0])[0], lambda flag: flag is None)


def shrink_run(config: PretrainConfig, processes: int, steps: int) -> ShrunkRun:
    """Returns the shrunk run of a config, on at most `processes` processes. Raises UserError for a run of one rank,
    which has nothing to compare."""
    if config.world_size == 1:
        raise UserError(
            "there is one rank, and so nothing to compare; give sizes of a layout, or WORLD_SIZE=N before it"
        )
    sizes, notes = shrink_layout(config, processes)
    shape = ShrunkFlags(config, sizes, steps, notes)
    kept = set(fields_of_groups(_MODEL_GROUPS)) - _LAYOUT_TOO - _FORMATS | _MODEL_TOO
    layout = set(fields_of_groups(_LAYOUT_GROUPS)) - _MODEL_TOO - _FORMATS | _LAYOUT_TOO
    model_words, layout_words = shape.model_words(), shape.layout_words()
    without = _overridden([*model_words, *layout_words]) | shape.left_out
    plain = command_line_of(config, kept - without)
    whole = command_line_of(config, (kept | layout) - without)
    return ShrunkRun(sizes, [*whole, *model_words, *layout_words], [*plain, *model_words], notes)


def _overridden(words: Sequence[str]) -> set[str]:
    return {name for name, flag in flag_table().items() if set(flag.spellings) & set(words)}


assert set(_MODEL_GROUPS) | set(_LAYOUT_GROUPS) <= GROUPS.keys()
