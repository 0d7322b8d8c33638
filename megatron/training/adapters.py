"""Runs that train low-rank adapters (--lora-rank): the model's frozen weights, and what checkpoints say of them."""

import contextlib
import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.core.adapters.attach import CHILD, add_adapters, answered_targets, check_targets, is_adapter
from megatron.core.adapters.layers import AdaptedLinear, first_magnitude
from megatron.core.adapters.nf4 import store_in_nf4
from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.dist_checkpointing.chunk import MASTER, Chunk, optimizer_state_name
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.folders import RELEASE
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.reading import load
from megatron.core.distributed import DistributedDataParallel
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.parameters import info_of
from megatron.core.utils.store_path import place
from megatron.training.checkpoint_checks import mismatch_policy, refuse_non_finite_weights
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.inspection.run_description import OF_ADAPTERS, architecture_differences, names_of_this_run
from megatron.training.providers import Context, Providers, Stage, stages_of_rank
from megatron.training.state import SavedParts, weight_chunks

BASE = "base"
"""Key of a checkpoint's description with the model that its adapters belong to: folder, iteration, digest."""


@dataclass(frozen=True)
class Base:
    """The model that adapters belong to."""

    kind: Literal["checkpoint", "hub"]
    """checkpoint: a folder of our checkpoints; hub: a Hugging Face folder."""
    folder: str
    digest: str
    """`digest_of_checkpoint` or `digest_of_folder`."""
    iteration: int | None = None

    @classmethod
    def of(cls, described: Mapping[str, object]) -> "Base | None":
        """Returns what a checkpoint's description says; None for a checkpoint of a whole model. Raises UserError for a
        damaged description."""
        found = described.get(BASE)
        if not found:
            return None
        try:
            assert isinstance(found, dict)
            return cls(**found)
        except (AssertionError, TypeError):
            raise UserError(f"config.{BASE} of a checkpoint's manifest is damaged: {found!r:.200}") from None

    def check(self, digest: str, folder: Path) -> None:
        """Raises UserError if the weights in a folder, which have this digest, are not those of the model."""
        if digest != self.digest:
            raise UserError(
                f"{folder} holds other weights than those that the adapters were trained with ({self.folder}); name "
                "the folder of the latter with --base"
            )

    def to_json(self) -> dict[str, object]:
        """Returns the record for a checkpoint's description."""
        return dataclasses.asdict(self)


_MASTERS = optimizer_state_name(MASTER, "")
_PAGE, _STRIDE = 4096, 1 << 20
"""A digest of a large file reads the first `_PAGE` bytes of every `_STRIDE` bytes."""


def with_adapters(config: PretrainConfig, providers: Providers) -> Providers:
    """Returns the providers of a run whose model chunks have adapters, if --lora-rank asks for them."""
    lora = config.adapters
    if lora.lora_rank is None:
        return providers
    build = providers.build_model

    def build_model(context: Context, stage: Stage) -> nn.Module:
        model = build(context, stage)
        add_adapters(model, lora, context.config.transformer)
        if len(stages_of_rank(context.config, 0)) == 1 and context.config.transformer.pipeline_model_parallel_size == 1:
            answered = answered_targets(model, lora)
            check_targets(lora, answered.used, answered.available)
        return model

    return dataclasses.replace(providers, build_model=build_model)


def begin_with_base(context: Context, parts: SavedParts, providers: Providers) -> Base | None:
    """Loads the frozen weights of a run with adapters, from --pretrained-checkpoint or --load-hf, before adapters are
    loaded. Returns them for checkpoints to name; None without adapters. Collective.

    Raises UserError, the same on all ranks, for names of --lora-target-modules that no layer answers, and if the
    weights cannot be loaded.
    """
    config, groups = context.config, context.environment.groups
    if config.adapters.lora_rank is None:
        return None
    _check_names(parts.model, config)
    if config.checkpoint.load_hf is not None:
        assert providers.load_first_weights is not None
        providers.load_first_weights(context, parts.model, parts.optimizer)
        source = Path(config.checkpoint.load_hf)
        digest = RankCoordinator().run_on_first(lambda: digest_of_folder(source))
        found = Base("hub", str(source.absolute()), digest)
    else:
        found = _load_checkpoint(config, groups, parts.model)
    if config.adapters.lora_base_weights == "nf4":
        for chunk in parts.model:
            store_in_nf4(chunk)
    begin_magnitudes(parts.model, parts.optimizer, groups)
    return found


def _check_names(model: Sequence[nn.Module], config: PretrainConfig) -> None:
    found = [answered_targets(chunk, config.adapters) for chunk in model]
    mine = [sorted(set().union(*(getattr(each, name) for each in found))) for name in ("used", "available")]
    of_ranks = RankCoordinator().gather(mine)
    used, available = ({word for of_rank in of_ranks for word in of_rank[kind]} for kind in (0, 1))
    check_targets(config.adapters, used, available)


def _load_checkpoint(config: PretrainConfig, groups: ProcessGroupCollection, model: Sequence[nn.Module]) -> Base:
    root = place(config.checkpoint.pretrained_checkpoint or "")
    ranks = RankCoordinator()
    step = ranks.run_on_first(lambda: _iteration_of_base(config, root))

    def say(*sentences: str) -> None:
        if groups.global_rank == 0:
            print(*sentences, sep="\n", flush=True)

    def accept(manifest: Manifest) -> None:
        adapted = Base.of(manifest.config)
        if adapted is not None:
            raise UserError(
                f"--pretrained-checkpoint {root} contains adapters alone; give the model that they adapt "
                f"({adapted.folder}), and the adapters as --load"
            )
        if step is None:
            refuse_non_finite_weights(manifest)
        for difference in architecture_differences(config, manifest.config, leave_out=OF_ADAPTERS):
            say(f"WARNING: {difference}")

    wanted = [chunk for chunk in weight_chunks(model, groups) if not is_adapter(chunk.name)]
    loaded = load(
        root,
        wanted,
        step=step,
        policy=mismatch_policy(config.checkpoint, with_optimizer=False),
        accept=accept,
        renames=lambda manifest: names_of_this_run(config, manifest.config),
        log=say,
    )
    if loaded is None:
        raise UserError(f"--pretrained-checkpoint {root} holds no checkpoint")
    iteration = loaded.manifest.iteration
    say(f"loaded the weights of iteration {iteration:7d} from {loaded.folder}, which stay as they are (--lora-rank)")
    return Base("checkpoint", str(root.absolute()), digest_of_checkpoint(loaded.manifest), iteration)


def _iteration_of_base(config: PretrainConfig, root: Path) -> int | None:
    """Returns the iteration of the base that the adapters under --load were trained with; None if there are none, or if
    they belong to another folder."""
    flags = config.checkpoint
    if flags.load is None:
        return flags.ckpt_step
    try:
        found = find_checkpoint(place(flags.load), flags.ckpt_step, lambda sentence: None)
        base = None if found is None else Base.of(found.manifest.config)
        step = None if base is None else base.iteration
        if step is not None and find_checkpoint(root, step, lambda sentence: None) is not None:
            return step
    except UserError:
        pass  # the load itself reports it
    return None


def check_base(config: PretrainConfig, manifest: Manifest, base: Base | None) -> None:
    """Raises UserError if the adapters of a checkpoint belong to another model than `base`, which this run has loaded;
    None for a run without adapters."""
    theirs = Base.of(manifest.config)
    if base is not None and theirs is not None and theirs.digest != base.digest:
        flag = "--load-hf" if config.checkpoint.load_hf is not None else "--pretrained-checkpoint"
        at = "" if theirs.iteration is None else f", iteration {theirs.iteration}"
        raise UserError(
            f"{flag} {base.folder} holds other weights than those that the adapters of iteration "
            f"{manifest.iteration} were trained with ({theirs.folder}{at}); give the same weights"
        )
    if theirs is not None and base is None:
        raise UserError(
            f"the checkpoint of iteration {manifest.iteration} contains adapters alone: give the flags of its run "
            "(--lora-rank and the model's), or make a whole model of it with tools/checkpoint/adapters.py merge"
        )


def load_base(
    context: Context,
    model: nn.Module,
    adapters: Manifest,
    moved_to: str | None,
    load_hub: Callable[[Context, Sequence[nn.Module], None, str], None] | None,
) -> None:
    """Loads the frozen weights of a model with adapters that is used outside its run, and stores them as the run did.
    Collective.

    The weights are those that the checkpoint of the adapters names, or those of the folder `moved_to`; `load_hub` reads
    them from a folder of the hub. Raises UserError, the same on all ranks, if they are not those of the run.
    """
    base = Base.of(adapters.config)
    assert base is not None
    folder = Path(moved_to or base.folder)

    if base.kind == "hub":
        if load_hub is None:
            raise UserError(f"these adapters belong to {base.folder}; merge them: tools/checkpoint/adapters.py merge")
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; name the adapted model with --base")
        RankCoordinator().run_on_first(lambda: base.check(digest_of_folder(folder), folder))
        load_hub(context, [model], None, str(folder))
    else:
        chunks = [chunk for chunk in weight_chunks([model], context.environment.groups) if not is_adapter(chunk.name)]
        policy = mismatch_policy(context.config.checkpoint, with_optimizer=False)
        try:
            load(
                folder,
                chunks,
                step=base.iteration or RELEASE,
                policy=policy,
                accept=lambda manifest: base.check(digest_of_checkpoint(manifest), folder),
                renames=lambda manifest: names_of_this_run(context.config, manifest.config),
                log=lambda sentence: None,
            )
        except UserError as error:
            advice = "" if "--base" in str(error) else "; name the adapted model with --base"
            raise UserError(f"{error}{advice}") from error
    if context.config.adapters.lora_base_weights == "nf4":
        store_in_nf4(model)


def refuse_adapters(folder: Path, described: Mapping[str, object]) -> None:
    """Raises UserError for a checkpoint that contains adapters alone, for tools that need a whole model."""
    if Base.of(described) is not None:
        raise UserError(
            f"{folder} contains adapters alone, not a model: make one of it with tools/checkpoint/adapters.py merge"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Digests


def digest_of_checkpoint(manifest: Manifest) -> str:
    """Returns the SHA-256 of a checkpoint's index files, which have checksums of all its tensors."""
    indexes = {name: digest.sha256 for name, digest in sorted(manifest.indexes.items())}
    return hashlib.sha256(json.dumps(indexes).encode()).hexdigest()


def digest_of_folder(folder: Path) -> str:
    """Returns a SHA-256 of a folder's safetensors files: their names, sizes and headers, and the first 4 KiB of every
    MiB, so that it takes seconds for any model."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        total.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            (header,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            total.update(file.read(min(header, size)))
            for position in range(0, size, _STRIDE):
                file.seek(position)
                total.update(file.read(_PAGE))
    return total.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# DoRA


@torch.no_grad()
def begin_magnitudes(
    model: Sequence[nn.Module], optimizer: MegatronOptimizer | None, groups: ProcessGroupCollection
) -> None:
    """Sets the magnitudes of DoRA to the norms of the rows of the frozen weights. Collective, as ranks that divide the
    columns of a weight sum its squares."""
    norms = dict(chain.from_iterable(map(_norms, model)))
    if not norms:
        return
    masters: Iterator[Chunk] = iter(()) if optimizer is None else optimizer.state_chunks()
    for chunk in chain(weight_chunks(model, groups), masters):
        name = chunk.name.removeprefix(_MASTERS)
        if name in norms:
            begin, end = chunk.range
            chunk.load(norms[name][begin:end].to(chunk.tensor.dtype))
    if optimizer is not None:
        optimizer.after_load()


def _norms(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for layer in model.modules():
        adapted = getattr(layer, "linear", None)
        if not isinstance(adapted, AdaptedLinear):
            continue
        for adapter in adapted.parts:
            if adapter.magnitude is not None:
                name = info_of(adapter.magnitude).name
                frozen = f"{name.partition(f'.{CHILD}.')[0]}.weight"
                wrapper = model if isinstance(model, DistributedDataParallel) else None
                with wrapper.whole_weights({frozen}) if wrapper else contextlib.nullcontext():
                    weight = layer.weight
                    assert weight is None or isinstance(weight, Tensor)
                    rows = adapted.rows_of(weight, adapter.part)
                    norm = first_magnitude(rows, adapted.columns_group)
                yield name, norm
