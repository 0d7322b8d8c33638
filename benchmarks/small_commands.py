"""Reduces training commands for benchmarks/try_commands.py: flags appended to a command set sizes, data and paths."""

from collections.abc import Sequence

from megatron.core.transformer.layer_patterns import has_mixer
from megatron.diagnosis.layout_check.shrink_layout import LayoutSizes, shrink_layout
from megatron.diagnosis.layout_check.shrink_model import ShrunkFlags
from megatron.training.config.command_line import split_words
from megatron.training.config.file_checks import PATHS
from megatron.training.config.flag_table import flags_by_spelling, spelling_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.retired import translate_all

STEPS = 2


def data_words(entry: str, folder: str) -> list[str]:
    """Returns flags for made-up data and for a tokenizer that does not need the command's files."""
    if entry in ("pretrain_gpt.py", "pretrain_hybrid.py"):
        return ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", f"{folder}/vocab.txt"]
    return ["--mock-data", *tokenizer]


def small_command(config: PretrainConfig, argv: Sequence[str], processes: int) -> tuple[list[str], int]:
    """Returns the words of a command with flags at its end that make it small, and its number of ranks."""
    sizes, notes = shrink_layout(config, processes)
    shape = ShrunkFlags(config, sizes, STEPS, notes)
    added = [*_own_sizes(shape, config), *shape.layout_words(), *_schedule_words(config, sizes)]
    added += _path_words(config)
    if config.transformer.fp8:
        added += _fp8_words(config, sizes)
    if config.transformer.num_encoder_layers:
        added += ["--encoder-num-layers", "2", "--decoder-num-layers", "2", "--seq-length", "32"]
        added += ["--encoder-seq-length", "32", "--decoder-seq-length", "32", "--max-position-embeddings", "32"]
    set_again = {flags_by_spelling()[word].field for word in added if word in flags_by_spelling()}
    kept = _without(argv, (shape.left_out | _NEVER_ENDS) - set_again - _KEPT)
    return [*kept, *added], sizes.ranks


def _fp8_words(config: PretrainConfig, sizes: LayoutSizes) -> list[str]:
    """Returns flags for widths that divide by 16 on each rank, which products in fp8 need."""
    transformer = config.transformer
    words: dict[str, int] = {"ffn-hidden-size": 32 * sizes.tensor}
    if transformer.num_moe_experts is not None:
        words["moe-ffn-hidden-size"] = 32 * sizes.expert_tensor
        if transformer.moe_shared_expert_intermediate_size:
            words["moe-shared-expert-intermediate-size"] = 32 * sizes.tensor
    if transformer.multi_latent_attention:
        words |= {"kv-lora-rank": 16, "qk-head-dim": 16, "qk-pos-emb-head-dim": 16, "v-head-dim": 16}
        if getattr(transformer, "q_lora_rank", None) is not None:
            words["q-lora-rank"] = 16
    if "M" in (transformer.hybrid_layer_pattern or ""):
        groups = sizes.tensor * sizes.context
        words |= {"mamba-num-groups": groups, "mamba-num-heads": 16 * groups, "mamba-head-dim": 16}
        words["mamba-state-dim"] = 16
    if has_mixer(transformer, "gated_delta_net"):
        heads = 4 * sizes.tensor * sizes.context
        words |= {"linear-num-key-heads": heads, "linear-num-value-heads": 2 * heads}
        words |= {"linear-key-head-dim": 16, "linear-value-head-dim": 16}
    return [word for name, size in words.items() for word in (f"--{name}", str(size))]


_NEVER_ENDS = {"full_validation"}
"""Fields whose flags are left out: made-up data has a very long validation set."""

_KEPT = {"group_query_attention", "num_query_groups", "spec"}


def _own_sizes(shape: ShrunkFlags, config: PretrainConfig) -> list[str]:
    """Returns the flags for the sizes of the model, without those that verify_layout.py adds for its comparison."""
    words, at = shape.model_words(), 0
    result: list[str] = []
    while at < len(words):
        end = next((place for place in range(at + 1, len(words)) if words[place].startswith("--")), len(words))
        if words[at] not in _COMPARISON:
            result += words[at:end]
        at = end
    if config.transformer.num_query_groups not in (None, config.transformer.num_attention_heads):
        return result
    return [*result, "--num-query-groups", str(2 * shape.sizes.tensor * shape.sizes.context)]


_COMPARISON = {"--fp64", "--lr", "--lr-decay-style", "--train-iters", "--tokenizer-type", "--vocab-size", "--mock-data"}
_COMPARISON |= {"--eval-iters", "--log-interval"}


def _schedule_words(config: PretrainConfig, sizes: LayoutSizes) -> list[str]:
    """Returns flags that shorten the schedule and keep its kind."""
    given = {name for name, source in config.provenance.items() if source in ("flag", "script")}
    rows = min(2, config.training.micro_batch_size or 1)
    batch = rows * 2 * sizes.pipeline * sizes.data
    counted = "samples" if config.training.train_samples is not None else "iters"
    unit = batch if counted == "samples" else 1
    values = {f"train_{counted}": STEPS * unit, f"lr_decay_{counted}": 10 * unit, f"lr_warmup_{counted}": unit}
    values |= {f"lr_wsd_decay_{counted}": unit, "exit_interval": STEPS, "save_interval": STEPS}
    words = [f"--train-{counted}", str(STEPS * unit), "--eval-iters", "1", "--log-interval", "1"]
    for name, value in values.items():
        if name in given and not name.startswith("train_"):
            words += [spelling_of(name), str(value)]
    if config.training.step_batch_size_schedule:
        words += ["--step-batch-size-schedule", f"0:{batch}"]
    if config.training.rampup_batch_size:
        words += ["--rampup-batch-size", *[str(batch // 2)] * 3]
    return words


def _path_words(config: PretrainConfig) -> list[str]:
    """Returns flags that move the folders of a run into the working folder, which has no checkpoints to load."""
    flat, words = config.flat(), []
    for name in (*PATHS, "wandb_save_dir"):
        if flat.get(name) and not name.endswith(("data_path", "args_path", "config_path", "_file", "_model")):
            words += [spelling_of(name), name]
    return words


def _without(argv: Sequence[str], fields: set[str]) -> list[str]:
    """Returns the words without the flags of these fields."""
    kept: list[str] = []
    for occurrence in split_words(argv)[0]:
        today = translate_all([occurrence])[0]
        flags = [flags_by_spelling().get(each.spelling) for each in today]
        if not any(flag is not None and flag.field in fields for flag in flags):
            kept += occurrence.as_words()
    return kept
