"""Loads the model of a checkpoint for use outside its run: generation, measurements."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megatron.core.adapters.attach import add_adapters, is_adapter
from megatron.core.dist_checkpointing.checkpoint_selection import Log, open_newest
from megatron.core.dist_checkpointing.chunk import SCALING_STATE, Chunk, model_chunks, optimizer_state_name
from megatron.core.dist_checkpointing.planning import MismatchPolicy
from megatron.core.dist_checkpointing.reading import load
from megatron.core.exceptions import UserError
from megatron.core.utils.store_path import place
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.build import build_tokenizer
from megatron.training.adapters import Base, load_base
from megatron.training.arguments import configure
from megatron.training.config.command_line import split_words
from megatron.training.config.flag_table import Flag
from megatron.training.config.inference_layout import InferenceLayout
from megatron.training.config.model_families import NAMES
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.recorded_flags import check_spec, flags_of_model, is_of_run, recorded_words
from megatron.training.config.retired import Occurrence
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.run_description import check_architecture
from megatron.training.launch.environment import process_environment
from megatron.training.providers import Context, Stage, stages_of_rank
from megatron.training.state import TrainState

_FORMATS = ("fp16", "bf16", "fp64")
_OF_THE_RUN = ("checkpoints", "logging", "faults and signals", "tensors of single steps")
"""Sections of flags that say nothing about the model. Some need paths, which are not taken from a checkpoint."""


LoadHub = Callable[[Context, Sequence[nn.Module], None, str], None]
"""Fills a model with the weights of a Hugging Face folder."""


@dataclass(frozen=True)
class TrainedModel:
    """A whole model in evaluation mode, with its tokenizer and settings."""

    model: nn.Module
    tokenizer: Tokenizer
    config: PretrainConfig
    """Settings of the run that trained it, adapted to one process."""
    iteration: int
    device: torch.device

    @property
    def max_sequence_length(self) -> int:
        """Sequence length that the model was trained with."""
        return self.config.model.max_position_embeddings


def load_trained_model(
    build_model: Callable[[Context, Stage], nn.Module],
    root: str | Path,
    step: int | None = None,
    changes: Sequence[str] = (),
    log: Log = print,
    *,
    average: bool = False,
    base: str | None = None,
    load_hub: LoadHub | None = None,
) -> TrainedModel:
    """Returns the model of the newest complete checkpoint under `root`, or of iteration `step`, on this process's
    device.

    `build_model` is the model builder of the script that trained it. The flags are those that the checkpoint was
    written with, followed by `changes` (words of a command line, such as the tokenizer's new path). On a CPU the
    weights of a half-precision run are held in float32. With `average` the weights are their moving average
    (--ema-decay).

    A checkpoint of adapters (--lora-rank) names the model that they belong to; `base` is its folder if it has moved,
    and `load_hub` reads a folder of the hub (`megatron.conversion.hub_run.load_hub_weights`).

    Raises UserError if there is no complete checkpoint, or if its flags, files or tensors do not make a model.
    """
    with open_trained_model(
        build_model, root, step, changes, log, average=average, base=base, load_hub=load_hub
    ) as trained:
        return trained


@contextlib.contextmanager
def open_trained_model(
    build_model: Callable[[Context, Stage], nn.Module],
    root: str | Path,
    step: int | None = None,
    changes: Sequence[str] = (),
    log: Log = print,
    *,
    average: bool = False,
    layout: InferenceLayout | None = None,
    base: str | None = None,
    load_hub: LoadHub | None = None,
) -> Iterator[TrainedModel]:
    """Like `load_trained_model`, but yields this rank's part of the model in a layout. The ranks are connected inside
    the context. Raises UserError for a model that is not divided, as a BERT or a T5."""
    layout = layout or InferenceLayout()
    checkpoint = open_newest(place(root), step, log)
    described = checkpoint.manifest.config
    launch = LaunchEnvironment(layout.num_ranks, torch.cuda.is_available())
    config = _config_of(described, [*layout.words, *changes], launch)
    adapted = Base.of(described) is not None
    if base is not None and not adapted:
        raise UserError(f"--base {base}: {checkpoint.folder} is a whole model without adapters; leave the flag out")
    check_architecture(config, described)
    if layout.num_ranks > 1 and config.model.model_family in ("bert", "t5"):
        family = config.model.model_family.upper()
        raise UserError(f"{' '.join(layout.words[:-4])}: a {family} runs in one process here; leave the flags out")
    tokenizer = build_tokenizer(config.tokenizer)
    with process_environment(config) as environment:
        (stage,) = stages_of_rank(config, environment.groups.rank("pp"))
        context = Context(config, environment, tokenizer, TrainState())
        model = build_model(context, stage)
        if adapted:
            add_adapters(model, config.adapters, config.transformer)
        model = model.to(environment.device)
        if adapted:
            load_base(context, model, checkpoint.manifest, base, load_hub)
        state_of_training = MismatchPolicy(patterns=(optimizer_state_name("*", "*"), SCALING_STATE))
        chunks: Iterable[Chunk] = (
            chunk for chunk in model_chunks(model, lambda info: ()) if is_adapter(chunk.name) or not adapted
        )
        if average:
            names = checkpoint.averages()
            chunks = [dataclasses.replace(chunk, name=names.get(chunk.name, chunk.name)) for chunk in chunks]
            state_of_training = MismatchPolicy(unused=True)
        loaded = load(place(root), chunks, step=step, policy=state_of_training, log=lambda sentence: None)
        assert loaded is not None
        yield TrainedModel(model.eval(), tokenizer, config, loaded.manifest.iteration, environment.device)


def config_for_one_process(
    described: Mapping[str, object], changes: Sequence[str], *, has_cuda: bool
) -> PretrainConfig:
    """Returns the settings of the run that a checkpoint describes, for its model in one process, with the words
    `changes` after its flags. Settings that only training needs may be missing.

    Only flags that may come from a checkpoint are taken (`Flag.from_checkpoint`). Raises UserError if they make no
    model, or if the model's layers are code (--spec) that `changes` does not name.
    """
    return _config_of(described, changes, LaunchEnvironment(1, has_cuda))


def _config_of(described: Mapping[str, object], changes: Sequence[str], launch: LaunchEnvironment) -> PretrainConfig:
    recorded = recorded_words(described)
    given = {occurrence.spelling for occurrence in split_words(changes)[0]}
    check_spec(recorded, given="--spec" in given)
    words = [word for one in _for_one_process(recorded, half=launch.has_cuda) for word in one.as_words()]
    name = described.get("model_family")
    if name and name not in NAMES:
        raise UserError(f"the checkpoint is of the model family {name!r}; {', '.join(NAMES)} are known")
    family = {"model_family": name} if name else {}
    return configure([*words, *changes, "--dry-run"], None, family, launch_environment=launch)


def _for_one_process(words: Sequence[str], *, half: bool) -> list[Occurrence]:
    """Returns the flags of a run without those of its layout; without `half`, also without half-precision formats."""
    kept_formats = _FORMATS if half else _FORMATS[2:]

    def is_kept(flag: Flag) -> bool:
        return flag.field in kept_formats or not (is_of_run(flag) or flag.group in _OF_THE_RUN)

    return [occurrence for _, occurrence in flags_of_model(words, is_kept)]
