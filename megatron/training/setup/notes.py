"""Notes that a run prints before it starts: its kernels, its data, and behaviour that a user may not expect."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.units import named_infos
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.attention.flash3 import find_flash3
from megatron.core.ops.attention.kernels import SDPA_CUDNN
from megatron.core.pipeline_parallel.stage_map import stage_map, stages_text
from megatron.core.transformer.config.memory import captures_micro_batches
from megatron.core.transformer.kernels_in_use import AttentionInUse, BackendInUse, kernels_in_use
from megatron.core.transformer.layer_patterns import has_mixer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils.url_keys import hide_keys
from megatron.data.datasets.bin_file import most_open_files
from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.megatron_dataset import MegatronDataset
from megatron.data.datasets.staged_blend import StagedBlend
from megatron.data.preparation.config import available_cores
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.sources import prefixes_of_run
from megatron.training.data.splits import Splits
from megatron.training.evaluate import full_pass
from megatron.training.launch.environment import Environment


def kernel_notes(model: Sequence[nn.Module], environment: Environment, config: PretrainConfig) -> Iterator[str]:
    """Yields the kernels that compute the layers of this pipeline stage, on its first rank. The backend is the same on
    all stages; the stage with the first layer reports it."""
    groups, stages = environment.groups, stage_map(config.transformer)
    if any(groups.rank(axis) for axis in ("tp", "cp", "dp")):
        return
    begins = (
        groups.rank("pp") == stages.embedding_rank
        if config.transformer.num_encoder_layers
        else any(1 in stages.stage_at(groups.rank("pp"), chunk).layers for chunk in range(stages.chunks))
    )
    by_document = config.data.reset_attention_mask or config.training.sft
    for found in kernels_in_use(nn.ModuleList(model), environment.device, by_document):
        if begins or isinstance(found, AttentionInUse):
            yield str(found)
            if environment.device.type == "cuda":
                yield from unused_package_notes(found)


def unused_package_notes(found: BackendInUse | AttentionInUse) -> Iterator[str]:
    """Yields a line if a package is installed that would compute this instead, and is not used."""
    asks = isinstance(found, AttentionInUse) and not found.crosses and SDPA_CUDNN.name in found.kernels
    if asks and find_flash3() is not None:
        yield (
            "FlashAttention-3 is installed and not used: --attention-backend flash uses it; the two have not been "
            "compared"
        )


def holding_notes(
    model: Sequence[DistributedDataParallel], groups: ProcessGroupCollection, config: TransformerConfig
) -> list[str]:
    """Returns a line for each pipeline rank: the parts of the model on it, and the parameters of each of its ranks.
    Collective over all ranks."""
    stages = stage_map(config)
    chunks = [stages.stage_at(groups.rank("pp"), chunk) for chunk in range(stages.chunks)]
    count = sum(info.box.numel for chunk in model for _, info in named_infos(chunk))
    trained = sum(slot.info.box.numel for chunk in model for unit in chunk.units for slot in unit.slots)
    counts: dict[int, list[int]] = {}
    parts: dict[int, str] = {}
    most_trained: dict[int, int] = {}
    for stage, part, *found in RankCoordinator().gather([groups.rank("pp"), stages_text(chunks), count, trained]):
        counts.setdefault(stage, []).append(found[0])
        parts[stage] = part
        most_trained[stage] = max(most_trained.get(stage, 0), found[1])
    lines = []
    for stage, found in sorted(counts.items()):
        least, most = min(found), max(found)
        each = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        who = "this process" if sum(map(len, counts.values())) == 1 else f"each of {len(found)} ranks"
        where = f" of pipeline rank {stage}" if len(counts) > 1 else ""
        of_them = f", of which {most_trained[stage]:,} are trained" if most_trained[stage] < most else ""
        lines.append(f"{who}{where} holds {parts[stage]}: {each} parameters{of_them}")
    return lines


def run_notes(config: PretrainConfig, environment: Environment, splits: Splits) -> Iterator[str]:
    """Yields a line for each behaviour of the run that a user may not expect. Raises UserError if the run has nothing
    to do."""
    evaluation = config.evaluation
    if environment.device.type == "cpu" and captures_micro_batches(config.transformer):
        yield "--cuda-graph-impl local: has no effect on a CPU, which has no CUDA graphs; results are the same"
    if config.transformer.fp16 and environment.device.type == "cpu":
        yield "--fp16 on a CPU: products and sums are computed in float32 and rounded to float16"
    yield from _scan_notes(config, environment)
    cores = available_cores()
    if config.data.num_workers > cores:
        yield (
            f"--num-workers {config.data.num_workers}: each rank starts this many processes that read data, and this "
            f"machine gives it {cores} cores; --num-workers {cores} or less reads as fast"
        )
    yield from _open_file_notes(config)
    if evaluation.skip_train and splits.valid is None and splits.test is None and evaluation.eval_tasks is None:
        raise UserError(
            "--skip-train: there is no validation and no test data to evaluate; give each a share in --split, or files"
        )
    if evaluation.eval_iters == 0:
        if evaluation.eval_tasks is None:
            yield "--eval-iters 0: nothing is evaluated, neither in between nor at the end"
        return
    missing = [name for name, data in (("validation", splits.valid), ("test", splits.test)) if data is None]
    if missing:
        yield f"there is no {' and no '.join(missing)} data: no loss on it will be printed"
    whole = [valid_set for valid_set in splits.valid_sets if valid_set.num_samples is not None]
    bounded = f"; without --full-validation it takes {evaluation.eval_iters} (--eval-iters)"
    for valid_set in whole:
        taken = full_pass(valid_set.num_samples or 0, evaluation.global_batch_size(config.training))
        name = "" if valid_set.name is None else f" {valid_set.name}"
        number = f"{_counted(taken, 'global batch')}{bounded if config.data.mock_data else ''}"
        yield f"a validation takes the whole set{name}, {number}"
    if not whole and len(missing) < 2:
        samples = evaluation.eval_iters * evaluation.global_batch_size(config.training)
        taken_of_each = f"{_counted(evaluation.eval_iters, 'global batch')}, {_counted(samples, 'sample')}"
        yield f"an evaluation takes {taken_of_each}, not a whole data set"
    if splits.valid is not None and evaluation.eval_interval is None and not evaluation.skip_train:
        yield "without --eval-interval the validation data is looked at once, after the last iteration"


def _scan_notes(config: PretrainConfig, environment: Environment) -> Iterator[str]:
    scanned = [name for name in ("mamba", "gated_delta_net") if has_mixer(config.transformer, name)]
    if scanned and environment.device.type == "cuda" and not config.transformer.bf16:
        yield f"layers of {' and '.join(scanned)} pass their states by plain torch: the fast kernels are for --bf16"


def _open_file_notes(config: PretrainConfig) -> Iterator[str]:
    files, most = len(prefixes_of_run(config)) if config.data.sources() else 0, most_open_files()
    if files > most:
        yield (
            f"the data has {files} .bin files, of which a process keeps {most} open (half of ulimit -n): the others "
            "are closed and opened again, which takes time; raise the limit, or merge them (tools/merge_datasets.py)"
        )


def _counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as `1 global batch` or `2 global batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


MOST_LINES = 64
"""Largest number of data sets of a split that get a line each."""


def data_plan(splits: Sequence[Any], wanted: Sequence[int | None], seq_length: int) -> Iterator[str]:
    """Yields a line for each data set of the training, validation and test data.

    `splits` are the three data sets, each None, a data set, a blend, or a list of validation sets; those of a script's
    own kind are left out. `wanted` has the samples that the run takes from each split; None: all of them.
    """
    for name, split, samples in zip(("training", "validation", "test"), splits, wanted, strict=True):
        for each in split if isinstance(split, list | tuple) else [split]:
            found = list(_sources(each, samples))
            for source, count in found[:MOST_LINES]:
                yield f"{name} data: {_line(source, count, seq_length)}"
            if len(found) > MOST_LINES:
                rest = sum(count for _, count in found[MOST_LINES:])
                yield f"{name} data: {rest:,} samples of {len(found) - MOST_LINES} more data sets"


def _sources(split: Any, samples: int | None) -> Iterator[tuple[MegatronDataset, int]]:
    """Yields the data sets of a split, and the samples that the run takes from each."""
    if isinstance(split, StagedBlend):
        drawn = split.order.before[-1].tolist()
        yield from ((passes[0], count) for passes, count in zip(split.passes, drawn, strict=True) if passes)
    elif isinstance(split, BlendedDataset):
        whole = sum(map(len, split.datasets))
        shares = split.weights or [len(dataset) / whole for dataset in split.datasets]
        size = len(split) if samples is None else min(samples, len(split))
        yield from ((dataset, round(share * size)) for dataset, share in zip(split.datasets, shares, strict=True))
    elif isinstance(split, MegatronDataset):
        yield split, len(split) if samples is None else samples


def _line(dataset: MegatronDataset, samples: int, seq_length: int) -> str:
    text = f"{samples:,} samples of {hide_keys(dataset.dataset_path or 'made-up data')}"
    tokens = getattr(dataset, "tokens_per_epoch", None)
    if not tokens or dataset.dataset_path is None:
        return text
    return f"{text}, {samples * seq_length:,} tokens, {samples * seq_length / tokens:.3g} epochs of its {tokens:,}"
