"""Saves and loads checkpoints of a run: their content, when they are loaded, and the messages about them."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.async_saving import PendingSave, StagingMemory, begin_save
from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint, newest_iteration
from megatron.core.dist_checkpointing.chunk import AVERAGE, Chunk, optimizer_state_name
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.dist_checkpointing.disk import check_room
from megatron.core.dist_checkpointing.local_copies import LocalCopies, UnfitCopy
from megatron.core.dist_checkpointing.manifest import MANIFEST, Manifest
from megatron.core.dist_checkpointing.reading import LoadResult, load
from megatron.core.dist_checkpointing.writing import SaveResult, save
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.moe.routing import weights_sum_to_one
from megatron.core.transformer.config.router import listed
from megatron.core.transformer.moe.router import routing_rule
from megatron.core.transformer.moe.upcycling import dense_chunks, enlarge_second_products
from megatron.core.utils.store_path import place
from megatron.training.adapters import BASE, Base, check_base
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.checkpoint_checks import (
    check_dense_manifest,
    check_manifest,
    mismatch_policy,
    naming_of_damage,
    refuse_non_finite_weights,
)
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.data_record import data_differences, order_differences
from megatron.training.hooks.mix_report import Mix
from megatron.training.inspection.gpt_spelling import Renaming
from megatron.training.inspection.run_description import describe_run, names_of_this_run, setting_differences
from megatron.training.local_checkpoints import PendingLocalSave, begin_local_save, local_copies, save_local
from megatron.training.lr_schedule import schedule_flag
from megatron.training.rewind_record import Rewind, RewindRecord, temporary_folder
from megatron.training.state import (
    SavedParts,
    TrainState,
    checkpoint_bytes,
    kept_weight_chunks,
    optimizer_chunks_to_load,
    weights_are_finite,
)

FORMAT = "safetensors"
_LAST_CHANCE_SECONDS = 15.0
"""Seconds that a failed run waits for a checkpoint that is being written."""


class Checkpoints:
    """Saves and loads a run as its flags say. Every rank calls `save` and `load` together.

    Args:
        config: the run; `config.checkpoint` has the flags.
        groups: ranks of the run.
        record: the decisions to go back, which several objects may share; None: this object has its own.
    """

    def __init__(
        self, config: PretrainConfig, groups: ProcessGroupCollection, record: RewindRecord | None = None
    ) -> None:
        self.config = config
        self.flags: CheckpointConfig = config.checkpoint
        self.groups = groups
        self.last_saved: int | None = None
        """Iteration of the newest checkpoint under --save that this run wrote, began to write or resumed from."""
        self.data: Mapping[str, str] = {}
        """Digests of the run's data, which every checkpoint stores."""
        self.base: Base | None = None
        """The frozen weights of a run with adapters, which every checkpoint names; None without adapters."""
        self._saved_data: Mapping[str, str] = {}
        """Digests in the checkpoint that was loaded."""
        self.data_order: Mapping[str, str] = {}
        """What determines the order of the training samples, which every checkpoint stores."""
        self._saved_order: Mapping[str, str] = {}
        """What determined that order in the checkpoint that was loaded."""
        self.mix: Mix | None = None
        """Counts the samples drawn from each data set, which every checkpoint stores."""
        self._saved_drawn: Mapping[str, int] | None = None
        """Those counts in the checkpoint that was loaded; None if it has none."""
        self.record = RewindRecord(self.flags, self._say) if record is None else record
        """Decisions to go back from loss spikes; part of every checkpoint."""
        self.memory = StagingMemory()
        self.pending: tuple[int | None, PendingSave | PendingLocalSave] | None = None
        """Iteration and save that `begin_save` started and `finish_save` has not ended. The iteration is None for a
        temporary checkpoint."""

    # Saving ----------------------------------------------------------------------------------------------------------

    def save(self, parts: SavedParts, *, temporary: bool = False) -> None:
        """Writes a checkpoint of this state under --save; it is complete on disk on return. A temporary one goes to its
        own folder and replaces the one before. Raises UserError, the same on all ranks, if it cannot be written;
        earlier checkpoints are then untouched."""
        if temporary and self._local is not None:
            save_local(self._local, *self._contents(parts, temporary), self._say)
            return
        root = self._root(parts.state, temporary)
        chunks, facts = self._contents(parts, temporary)
        self._report_saved(parts.state.iteration, root, save(root, chunks, **facts))
        if not temporary:
            self.last_saved = parts.state.iteration

    def check_room(self, parts: SavedParts, with_optimizer: bool = True) -> None:
        """Raises UserError, the same on all ranks, if a checkpoint of this state can never fit under --save; prints a
        warning if it does not fit now. Collective. `with_optimizer` is False for an optimizer that has no state before
        its first step."""
        if self.flags.save is None:
            return
        ranks, root = RankCoordinator(), place(self.flags.save)
        mine = checkpoint_bytes(
            parts, self.groups, with_optimizer and not self.flags.no_save_optim, adapters_alone=self.base is not None
        )
        needed = sum(ranks.gather(mine))
        warning = ranks.run_on_first(lambda: check_room(root, needed))
        if warning is not None:
            self._say(f"WARNING: {warning}")

    def save_copy(self, root: Path, parts: SavedParts) -> None:
        """Writes a checkpoint under another folder than --save. No later save deletes it. Raises UserError like
        `save`."""
        chunks, facts = self._contents(parts)
        save(root, chunks, **{**facts, "keep_last": None, "keep_every": None})

    def begin_save(self, parts: SavedParts, *, temporary: bool = False) -> None:
        """Copies this state to host memory and starts to write it, while training continues; `finish_save` ends it.
        Raises UserError like `save`."""
        assert self.pending is None, "the save before is not finished"
        if temporary and self._local is not None:
            started = time.monotonic()
            chunks, facts = self._contents(parts, temporary)
            self.pending = None, begin_local_save(self._local, chunks, self.memory, facts, self._say, started)
            return
        root = self._root(parts.state, temporary)
        chunks, facts = self._contents(parts, temporary)
        announce = partial(self._report_saved, parts.state.iteration, root)
        pending = begin_save(root, chunks, self.memory, announce=announce, **facts)
        self.pending = None if temporary else parts.state.iteration, pending
        if not temporary:
            self.last_saved = parts.state.iteration

    def finish_save(self) -> int | None:
        """Waits until the checkpoint of the last `begin_save` is complete on disk, and returns its iteration; None if
        there is none or if it is temporary. Raises UserError like `save`."""
        if self.pending is None:
            return None
        (iteration, pending), self.pending = self.pending, None
        pending.finish()
        return iteration

    def close(self, is_complete: bool) -> None:
        """Ends the use of local copies, and deletes them if the run is complete and saved. Collective."""
        if self._local is not None:
            if is_complete:
                self._say(f"the run is complete: its local copies in {self._local.root} are deleted")
            self._local.close(delete=is_complete)

    def leave_save(self) -> None:
        """Waits a while for the checkpoint of the last `begin_save` to become complete. Called after a failure, so it
        needs no other rank: other ranks may be gone."""
        if self.pending is not None:
            self.pending[1].wait(_LAST_CHANCE_SECONDS)

    def _root(self, state: TrainState, temporary: bool) -> Path:
        assert self.flags.save is not None
        root = (temporary_folder(self.flags, self.flags.save) if temporary else None) or place(self.flags.save)
        self._say(f"saving checkpoint at iteration {state.iteration:7d} to {root} in {FORMAT} format")
        if not temporary:
            self.record.begin_save(state.iteration)
        return root

    @cached_property
    def _local(self) -> LocalCopies | None:
        """The copies on the hosts of the ranks (--non-persistent-ckpt-type local); None without them."""
        return local_copies(self.flags, self._layout(), self._say)

    def _layout(self) -> dict[str, int]:
        return {name: self.groups.size(name) for name in ("tp", "pp", "cp", "dp", "ep", "expt_tp")}

    def _contents(self, parts: SavedParts, temporary: bool = False) -> tuple[Iterator[Chunk], dict[str, Any]]:
        """Returns this rank's chunks, and everything else that a save takes."""
        keep_optimizer = not self.flags.no_save_optim
        weights = kept_weight_chunks(parts.model, self.groups, adapters_alone=self.base is not None)
        chunks = chain(weights, parts.optimizer.state_chunks() if keep_optimizer else ())
        common = {
            "train_state": parts.state.to_json(),
            "scheduler": parts.scheduler.state_dict(),
            "optimizer": parts.optimizer.common_state() if keep_optimizer else None,
        }
        common |= {} if parts.spikes is None else {"loss_spikes": parts.spikes.state_dict()}
        common |= {} if self.mix is None else {"samples_drawn": self.mix.drawn(parts.state.consumed_train_samples)}
        common |= self.record.state_dict()
        of_data: dict[str, object] = {"data": dict(self.data), "data_order": dict(self.data_order)}
        of_data |= {} if self.base is None else {BASE: self.base.to_json()}
        description = describe_run(self.config) | {name: facts for name, facts in of_data.items() if facts}
        kept = (1, None) if temporary else (self.flags.keep_last, self.flags.save_retain_interval)
        facts = {"config": description, "layout": self._layout(), "keep_last": kept[0], "keep_every": kept[1]}
        finite = weights_are_finite(parts.model, self.groups)
        return chunks, {"step": parts.state.iteration, "common": common, "weights_finite": finite, **facts}

    def _report_saved(self, iteration: int, root: Path, saved: SaveResult) -> None:
        self._say(
            f"  successfully saved checkpoint from iteration {iteration:7d} to {root} {self._place()} "
            f"({saved.nbytes / 1e6:.1f} MB in {saved.seconds:.2f} s)",
            *(f"  {note}" for note in saved.notes),
        )

    # Loading ---------------------------------------------------------------------------------------------------------

    def load(self, parts: SavedParts) -> bool:
        """Continues from the checkpoint that --load, --ckpt-step and --pretrained-checkpoint name; returns False for a
        fresh start.

        Raises UserError, the same on all ranks, if the checkpoint cannot be loaded, or if there is none and
        --exit-on-missing-checkpoint is given.
        """
        if self.config.transformer.moe_use_upcycling:
            loaded = self._load_upcycled(parts)
        else:
            loaded = self._load(parts)
        self.record.begin_new_run()
        return loaded

    def state_to_load(self) -> TrainState:
        """Returns the counts that `load` will restore, before there is a model; zeros for a fresh start. Leaves errors
        to `load`. That finds broken tensors, too, and may then take an older checkpoint. Collective."""
        flags, upcycles = self.flags, self.config.transformer.moe_use_upcycling
        root, step = (flags.save, None) if upcycles else (flags.load, flags.ckpt_step)
        if root is None or (flags.finetune and not upcycles) or flags.override_ckpt_iteration is not None:
            return TrainState()
        if self._newer_local is not None:
            local, found = self._newer_local
            return TrainState.from_json(
                found.common.get("train_state") or {}, f"{local / MANIFEST}: common.train_state"
            )
        folder = place(root) if upcycles else self._folder_to_load(root, say=False)
        accept = self._refusing_unasked(folder, flags.save, step)

        def read() -> Any:
            try:
                found = find_checkpoint(folder, step, lambda sentence: None, accept)
            except UserError:
                return None
            return None if found is None else [str(found.folder / MANIFEST), found.manifest.common.get("train_state")]

        manifest, counts = RankCoordinator().run_on_first(read) or (None, None)
        return TrainState() if counts is None else TrainState.from_json(counts, f"{manifest}: common.train_state")

    def _load(self, parts: SavedParts) -> bool:
        flags = self.flags
        if flags.load is not None:
            loaded = self._read_local(parts)
            if loaded is None:
                root = self._folder_to_load(flags.load)
                loaded = self._read(root, parts, weights_only=flags.finetune, step=flags.ckpt_step)
            if loaded is not None:
                self._restore(loaded, parts)
                if flags.override_ckpt_iteration is not None:
                    self._override_iteration(parts.state, flags.override_ckpt_iteration)
                return True
        if flags.pretrained_checkpoint is not None and self.base is None:
            root = place(flags.pretrained_checkpoint)
            step = flags.ckpt_step if flags.load is None else None
            if self._read(root, parts, weights_only=True, step=step) is not None:
                return True
            raise UserError(f"--pretrained-checkpoint {flags.pretrained_checkpoint} holds no checkpoint")
        if flags.load is not None:
            if flags.exit_on_missing_checkpoint:
                raise UserError(f"--load {flags.load} holds no checkpoint, and --exit-on-missing-checkpoint is given")
            self._say(f"no checkpoint in {flags.load}: starting a new run")
        return False

    def reload(self, root: Path, iteration: int, parts: SavedParts) -> None:
        """Loads the checkpoint of an iteration into a run that has trained, counts and optimizer included, also with
        --finetune. Raises UserError, the same on all ranks, if the checkpoint cannot be loaded."""
        for chunk in parts.model:
            chunk.start_param_sync(force_sync=True)
        self.last_saved = None
        loaded = self._read(root, parts, weights_only=False, step=iteration)
        assert loaded is not None, "select_folders found the checkpoint before"
        self._restore(loaded, parts, counts=True, goes_back=True)

    def record_rewind(self, decision: Rewind, parts: SavedParts) -> None:
        """Records a decision to go back, in memory and on disk. Call it after the checkpoint of the decision is
        reloaded. A run that is killed before this call resumes from its newest checkpoint and meets the spike again. A
        run that is killed after it resumes from the checkpoint of the decision. Collective."""
        self.record.rewinds.add([decision])
        assert self.flags.save is not None
        if self.last_saved is None:  # it is not under --save, and a later run may know nothing but that folder
            self.save(parts)
        self.record.write(decision.iteration)

    @cached_property
    def _newer_local(self) -> tuple[Path, Manifest] | None:
        """Folder and manifest of this rank's local copy, if all ranks have one of the same iteration and it is newer
        than the checkpoints that the run goes on from. The first access is collective."""
        flags, root = self.flags, self._goes_on_from
        if self._local is None or root is None:
            return None
        accept = self._refusing_unasked(place(root), flags.save, None)
        newest = RankCoordinator().run_on_first(lambda: newest_iteration(place(root), accept))
        return self._local.recover(newest, accept)

    @property
    def _goes_on_from(self) -> str | None:
        """The folder with the newest checkpoints of this run; None if its flags name the checkpoint to begin with. An
        upcycled run has its own under --save, and --load is that of the dense model."""
        if self.config.transformer.moe_use_upcycling:
            return self.flags.save
        return None if self.flags.ckpt_step is not None or self.flags.finetune else self.flags.load

    def _read_local(self, parts: SavedParts) -> LoadResult | None:
        """Loads the newest local copy if it is newer than the checkpoints. None without one, or if it does not fit this
        run: the checkpoints may."""
        if self._newer_local is None:
            return None
        folder, manifest = self._newer_local
        self._say(f"the local copies of iteration {manifest.iteration} are newer than what is in {self._goes_on_from}")
        try:
            return self._read(folder, parts, weights_only=False, local=self._local)
        except UnfitCopy as error:
            self._say(f"WARNING: local copies are left out: {error}")
            return None

    def _folder_to_load(self, root: str, *, say: bool = True) -> Path:
        """Returns the folder of --load, or that of its temporary checkpoints if they are newer."""
        temporary = temporary_folder(self.flags, root)
        if temporary is None or self.flags.ckpt_step is not None:
            return place(root)
        accept = self.record.refusing_outdated(root, self.flags.save)
        newest = RankCoordinator().run_on_first(
            lambda: [newest_iteration(place(root), accept), newest_iteration(temporary, accept)]
        )
        if newest[1] <= newest[0]:
            return place(root)
        if say:
            self._say(f"the temporary checkpoint of iteration {newest[1]} in {temporary} is newer than those in {root}")
        return temporary

    def _refusing_unasked(self, root: Path, save: str | None, step: int | None) -> Callable[[Manifest], None]:
        """Returns a function that raises OutdatedCheckpoint for a checkpoint that is loaded only if `step` names it."""
        refuse_outdated = self.record.refusing_outdated(root, save)

        def refuse(manifest: Manifest) -> None:
            if step is None:
                refuse_outdated(manifest)
                refuse_non_finite_weights(manifest)

        return refuse

    def _load_upcycled(self, parts: SavedParts) -> bool:
        """Continues from --save if the run was upcycled before. Otherwise turns the MLPs of the dense checkpoint under
        --load or --pretrained-checkpoint into experts, and saves the new model under --save."""
        flags, transformer = self.flags, self.config.transformer
        if flags.save is not None:
            loaded = self._read_local(parts) or self._read(place(flags.save), parts, weights_only=False)
            if loaded is not None:
                self._say(f"--moe-use-upcycling: {flags.save} holds the upcycled run, which is continued")
                self._restore(loaded, parts, counts=True)
                return True
        source = place(flags.load or flags.pretrained_checkpoint or "")
        if self._read(source, parts, weights_only=True, step=flags.ckpt_step, dense=True) is None:
            raise UserError(f"--moe-use-upcycling: {source} holds no checkpoint")
        self._say(f"each MLP became {transformer.num_moe_experts} experts (--moe-use-upcycling)")
        sinkhorn = "sinkhorn" in listed(transformer.moe_router_load_balancing_type)
        if sinkhorn or not weights_sum_to_one(routing_rule(transformer)):
            self._say(
                "NOTE: the weights of a token's experts do not sum to 1, so the outputs differ from those of the "
                "dense model. They are equal with --moe-router-norm-topk-prob or without --moe-router-pre-softmax, if "
                "neither --moe-router-topk-scaling-factor nor sinkhorn routing is used"
            )
        if flags.save is not None:
            self.save(parts)
        return True

    def _read(
        self,
        root: Path,
        parts: SavedParts,
        *,
        weights_only: bool,
        step: int | None = None,
        dense: bool = False,
        local: LocalCopies | None = None,
    ) -> LoadResult | None:
        """Loads weights and, if wanted, optimizer state. Main weights are always loaded, together with the weights.
        `dense`: the checkpoint is that of a dense model, whose MLPs become experts. `local`: `root` is the folder of
        this rank's copy among these."""
        refuse_unasked = self._refusing_unasked(root, None if weights_only else self.flags.save, step)
        with_optimizer = not (weights_only or self.flags.no_load_optim or self.config.evaluation.skip_train)
        with_average = with_optimizer or (self.config.evaluation.skip_train and not weights_only)
        wanted: Iterable[Chunk] = chain(
            kept_weight_chunks(parts.model, self.groups, adapters_alone=self.base is not None),
            optimizer_chunks_to_load(parts.optimizer, with_optimizer, with_average),
        )
        own, granularity = list[Chunk](), self.config.transformer.moe_upcycling_granularity
        if dense:
            for chunk in parts.model:
                chunk.hold_weight_shards()
            own = list(wanted)
            wanted = dense_chunks(own, granularity)

        def accept(manifest: Manifest) -> None:
            refuse_unasked(manifest)
            check_base(self.config, manifest, self.base)
            if dense:
                check_dense_manifest(self.config, root, manifest, self._say)
            else:
                check_manifest(
                    self.config, manifest, self._say, weights_only=weights_only, with_optimizer=with_optimizer
                )

        policy = mismatch_policy(self.flags, with_optimizer)
        renames = None if dense else self._names_of_this_run
        if local is not None:
            loaded: LoadResult | None = local.load(root, wanted, accept)
        else:
            loaded = load(root, wanted, step=step, policy=policy, accept=accept, renames=renames, log=self._say)
        if loaded is not None:
            if dense:
                enlarge_second_products(own, granularity)
            parts.optimizer.after_load()
            average = parts.optimizer.average
            if average is not None and not (with_average and _has_average(loaded)):
                average.restart()
                self._say("--ema-decay: the average begins with the loaded weights")
            iteration = loaded.manifest.iteration
            what = "" if with_optimizer else " (weights only)" if weights_only else " (without optimizer state)"
            self._say(f"loaded checkpoint of iteration {iteration:7d} from {loaded.folder} {self._place()}{what}")
        return loaded

    def _names_of_this_run(self, manifest: Manifest) -> Renaming | None:
        renaming = names_of_this_run(self.config, manifest.config)
        if renaming is not None:
            of = "the hybrid model" if self.config.transformer.hybrid_layer_pattern is None else "the GPT"
            self._say(f"the checkpoint is that of {of} with the same layers; its tensors are read under our names")
        return renaming

    def _restore(self, loaded: LoadResult, parts: SavedParts, *, counts: bool = False, goes_back: bool = False) -> None:
        """Restores the state that is not a tensor. With --finetune and without `counts` it restores nothing, so the run
        begins at iteration 0. A run that only evaluates restores the counts, but neither schedule nor optimizer.
        `goes_back`: the run has trained, and knows already which checkpoints and decisions are its own."""
        common = loaded.manifest.common
        if (self.flags.finetune and not counts) or "train_state" not in common:
            return
        if not goes_back:
            self.record.go_on_from(loaded.folder, loaded.manifest)
        self._say(*setting_differences(self.config, loaded.manifest.config))
        self._saved_data = loaded.manifest.config.get("data", {})
        self._saved_order = loaded.manifest.config.get("data_order", {})
        self._saved_drawn = common.get("samples_drawn")
        manifest = loaded.folder / MANIFEST
        parts.state.restore(TrainState.from_json(common["train_state"], f"{manifest}: common.train_state"))
        if goes_back:
            self._continue_mix(parts.state.consumed_train_samples)
        if not self.config.evaluation.skip_train:
            with naming_of_damage(manifest, "scheduler"):
                spelling = partial(schedule_flag, self.config)
                parts.scheduler.load_state_dict(common["scheduler"], spelling, log=self._say)
            if not self.flags.no_load_optim:
                with naming_of_damage(manifest, "optimizer"):
                    parts.optimizer.load_common_state(common["optimizer"])
            if parts.spikes is not None:
                parts.spikes.load_state_dict(common.get("loss_spikes"))
        if self.record.is_in_save(loaded.folder):
            self.last_saved = parts.state.iteration

    def _override_iteration(self, state: TrainState, iteration: int) -> None:
        """Sets the counts to those after this iteration, in place of the checkpoint's iteration."""
        self._say(f"--override-ckpt-iteration: continues after iteration {iteration}, not {state.iteration}")
        state.iteration, self.last_saved = iteration, None
        batches = BatchSchedule.from_config(self.config.training, self.config.grid.data, self.config.data.seq_length)
        state.consumed_train_samples = batches.samples_of(iteration)
        state.consumed_tokens = state.consumed_train_samples * (self.config.data.seq_length or 0)

    def take_data(self, digests: Mapping[str, str], order: Mapping[str, str], mix: Mix | None, consumed: int) -> None:
        """Stores the digests of the run's data, the order of its training samples and its mix in later checkpoints.
        Prints what differs from the checkpoint that was loaded, which had trained on `consumed` samples. The first rank
        needs the digests."""
        self.data, self.data_order, self.mix = digests, order, mix
        if self._saved_data and digests:
            self._say(*data_differences(digests, self._saved_data))
        if not self.config.evaluation.skip_train:
            self._say(*order_differences(order, self._saved_order, consumed))
        self._continue_mix(consumed)

    def _continue_mix(self, consumed: int) -> None:
        if self.mix is not None and consumed:
            changed = bool([*order_differences(self.data_order, self._saved_order, consumed)])
            same_order = bool(self._saved_order) and not changed
            self._say(*self.mix.continue_from(self._saved_drawn, consumed, same_order))

    def _place(self) -> str:
        return "[ t {}/{}, p {}/{} ]".format(
            *(number for name in ("tp", "pp") for number in (self.groups.rank(name) + 1, self.groups.size(name)))
        )

    def _say(self, *sentences: str) -> None:
        print_on_first_rank(self.groups, *sentences)


def _has_average(loaded: LoadResult) -> bool:
    """Whether the checkpoint has the moving average of the weights."""
    prefix = optimizer_state_name(AVERAGE, "")
    mine = not any(name.startswith(prefix) for name in loaded.missing)
    return all(RankCoordinator().gather(mine))


def print_on_first_rank(groups: ProcessGroupCollection, *sentences: str) -> None:
    """Prints sentences, one per line, on global rank 0."""
    if groups.global_rank == 0 and sentences:
        print("\n".join(sentences), flush=True)
