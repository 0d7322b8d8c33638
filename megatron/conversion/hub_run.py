"""Runs that start from a Hugging Face folder (--load-hf), and that write such folders (--save-hf-interval)."""

import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.conversion.exporting import export_model
from megatron.conversion.families import FAMILIES
from megatron.conversion.family_choice import choose_family
from megatron.conversion.fp8_folder import read_weight
from megatron.conversion.importing import HubModel, open_hub_model
from megatron.conversion.tensor_mapping import HubTensor
from megatron.conversion.verification import check_finite
from megatron.core.adapters.attach import is_adapter
from megatron.core.dist_checkpointing.checkpoint_selection import Log
from megatron.core.dist_checkpointing.chunk import MASTER, Chunk, is_weight, optimizer_state_name
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.folders import folder_name
from megatron.core.dist_checkpointing.geometry import intersect
from megatron.core.exceptions import UserError
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.parameters import Box
from megatron.training.checkpoint_args import nothing_taken, take_model_flags
from megatron.training.config.command_line import CommandLine
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.recorded_flags import words_of_spec
from megatron.training.hooks.hook import Hook
from megatron.training.inspection.run_description import OF_ADAPTERS, architecture_differences, describe_run
from megatron.training.providers import Context, Providers
from megatron.training.state import weight_chunks
from megatron.training.trained_model import config_for_one_process

FOLDER = "hf"
"""Folder in that of --save with the exports."""

_MASTERS = optimizer_state_name(MASTER, "")


def take_hub_args(line: CommandLine) -> None:
    """Takes the model's flags from the folder of --load-hf, and those of its tokenizer if they are not given. A folder
    that cannot be used adds a problem."""
    folder = line.values["load_hf"]
    if not folder:  # an empty path is a problem that the checks of the flags find
        return
    try:
        hub = _open(folder, line.warnings.append)
    except UserError as error:
        for problem in str(error).splitlines():
            nothing_taken(line, f"--load-hf: {problem}")
        return
    words = list(hub.flags)
    given = line.values["tokenizer_type"] or line.values["vocab_file"] or line.values["tokenizer_model"]
    if "NullTokenizer" in words and given not in (None, "NullTokenizer"):
        # The run's own tokenizer: --vocab-size counts all rows, where that of NullTokenizer leaves out its last id.
        words[words.index("--tokenizer-type") :] = ["--vocab-size", str(hub.vocab_size)]
    take_model_flags(line, words, folder, "--load-hf")


def with_hub_folders(config: PretrainConfig, providers: Providers) -> Providers:
    """Returns the providers of a run with what --load-hf and --save-hf-interval ask for."""
    flags = config.checkpoint
    if flags.load_hf is not None:
        providers = dataclasses.replace(providers, load_first_weights=load_hub_weights)
    if flags.save_hf_interval is not None:
        of_script = providers.build_hooks

        def build_hooks(context: Context) -> Sequence[Hook]:
            export = HubExport(context.config, context.environment.is_first)
            return [export, *(() if of_script is None else of_script(context))]

        providers = dataclasses.replace(providers, build_hooks=build_hooks)
    return providers


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load_hub_weights(
    context: Context, model: Sequence[nn.Module], optimizer: MegatronOptimizer | None, folder: str | None = None
) -> None:
    """Fills weights, and main weights if there is an optimizer, from a Hugging Face folder, by default that of
    --load-hf. Each rank reads the tensors of which it has a part.

    Raises UserError, the same on all ranks, if the model of the run is another one, or if a tensor is missing, left
    over, of another shape, NaN or infinite.
    """
    config = context.config
    source = folder or config.checkpoint.load_hf
    assert source is not None
    state: Iterable[Chunk] = () if optimizer is None else optimizer.state_chunks()
    masters = (chunk for chunk in state if chunk.name.startswith(_MASTERS))
    weights = weight_chunks(model, context.environment.groups)
    named = ((chunk, _weight_of(chunk)) for chunk in chain(weights, masters))
    chunks = [chunk for chunk, name in named if is_weight(name) and not is_adapter(name)]
    of_run = optimizer is not None and context.environment.is_first  # the output of tools is their results
    say = print if of_run else _say_nothing

    ranks = RankCoordinator()
    of_ranks = ranks.gather({_weight_of(chunk): list(chunk.global_shape) for chunk in chunks})
    shapes = {name: tuple(shape) for of_rank in of_ranks for name, shape in of_rank.items()}

    def fill() -> None:
        hub = _open(source, _say_nothing)
        _check_model(config, hub)
        check_rows(context, hub)
        _fill(chunks, hub, hub.tensors(config, shapes, say))

    ranks.run_on_all(fill)
    if optimizer is not None:
        optimizer.after_load()
    say(f"loaded the weights of {source}")


def _say_nothing(sentence: str) -> None:
    """Does nothing: the log function of the ranks that do not print."""


def _open(source: str, log: Log) -> HubModel:
    path = Path(source)
    if not path.is_dir():
        raise UserError(f"{source}: no such folder")
    return open_hub_model(path, path.absolute(), (), FAMILIES, log)


def _check_model(config: PretrainConfig, hub: HubModel) -> None:
    family = hub.family.model_family
    if family != (config.model.model_family or "gpt"):
        raise UserError(f"--load-hf {hub.folder.path}: pretrain_{family}.py trains a {hub.family.architecture}")
    theirs, _ = hub.config_for_one_process()
    differences = architecture_differences(config, describe_run(theirs), leave_out=OF_ADAPTERS)
    if differences:
        raise UserError(f"--load-hf {hub.folder.path} is another model than the run's: {'; '.join(differences)}")


def check_rows(context: Context, hub: HubModel) -> None:
    """Raises UserError if the run's tokenizer has ids that the model of the folder has no row for."""
    if context.vocab_size > hub.vocab_size:
        tokenizer = context.config.tokenizer
        if tokenizer.family == "NullTokenizer":
            advice = f"give --vocab-size {hub.vocab_size - 1} or less"
        elif context.tokenizer.vocab_size <= hub.vocab_size:
            advice = f"leave --vocab-size {tokenizer.vocab_size} out"
        elif "NullTokenizer" in hub.flags:
            advice = "give the tokenizer that the model was trained with, as the folder has none that fits"
        else:
            advice = "leave --tokenizer-type out to train with the model's own tokenizer"
        raise UserError(
            f"--load-hf {hub.folder.path}: the model has {hub.vocab_size} rows, one for each id, but the run's "
            f"{tokenizer.family} needs {context.vocab_size}; {advice}"
        )


def _weight_of(chunk: Chunk) -> str:
    return chunk.name.removeprefix(_MASTERS)


@torch.no_grad()
def _fill(chunks: Sequence[Chunk], hub: HubModel, wanted: Sequence[HubTensor]) -> None:
    tensors: dict[str, list[HubTensor]] = {}
    for tensor in wanted:
        tensors.setdefault(tensor.canonical_name, []).append(tensor)
    by_weight: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_weight.setdefault(_weight_of(chunk), []).append(chunk)
    for name, mine in by_weight.items():
        shape = mine[0].global_shape
        if name not in tensors or tensors[name][0].global_shape != tuple(shape):
            found = list(tensors[name][0].global_shape) if name in tensors else "no such tensor"
            raise UserError(f"--load-hf {hub.folder.path}: {name} has shape {list(shape)} in this run, there {found}")
        whole = _whole(shape, [chunk.box for chunk in mine], hub, tensors[name])
        for chunk in mine:
            begin, end = chunk.range
            values = whole[chunk.box.slices].reshape(-1)[begin:end]
            chunk.load(values.to(chunk.tensor.dtype))


def _whole(shape: Sequence[int], boxes: Sequence[Box], hub: HubModel, tensors: Sequence[HubTensor]) -> Tensor:
    """Returns a canonical tensor whose elements in these boxes are read; the others are left as they are."""
    named = tensors[0].name
    first = torch.float32 if named in hub.folder.scales else hub.folder.tensors[named].dtype
    whole = torch.empty(tuple(shape), dtype=first)
    for tensor in tensors:
        if not any(intersect(part, box) for part in tensor.boxes for box in boxes):
            continue
        place = hub.folder.tensors[tensor.name]
        values = read_weight(hub.folder, tensor.name)
        check_finite(values, f"{place.path}: {tensor.name}", place.dtype)
        for part in tensor.boxes:
            whole[part.slices] = tensor.take(values, part).view(part.shape).to(first)
    return whole


# ---------------------------------------------------------------------------------------------------------------------
# Saving


class HubExport(Hook):
    """Exports every checkpoint whose iteration is a multiple of --save-hf-interval. The first rank writes.

    Raises UserError if no known architecture expresses the run's model. An export that fails later, such as by a full
    disk, is printed, and the run continues.
    """

    def __init__(self, config: PretrainConfig, is_first: bool) -> None:
        flags = config.checkpoint
        assert flags.save is not None and flags.save_hf_interval is not None
        self._root, self._interval = Path(flags.save), flags.save_hf_interval
        self._is_first, self._spec = is_first, config.model.spec
        try:
            alone = config_for_one_process(describe_run(config), words_of_spec(self._spec), has_cuda=False)
            choose_family(alone, None, FAMILIES)
        except UserError as error:
            raise UserError(f"--save-hf-interval: {error}") from None

    def after_save(self, iteration: int) -> None:
        """Exports the checkpoint of this iteration, if one is due."""
        if iteration % self._interval or not self._is_first:
            return
        target = self._root / FOLDER / folder_name(iteration)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():  # of a run that went back to an older checkpoint
                shutil.rmtree(target)
            done = export_model(self._root, target, None, step=iteration, spec=self._spec, log=_say_nothing)
            print(f"  exported {done.architecture} to {target} ({done.nbytes / 1e6:.1f} MB)", flush=True)
        except (UserError, OSError) as error:
            print(f"WARNING: --save-hf-interval: {target} is not written: {error}", flush=True)
