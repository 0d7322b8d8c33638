"""Rules about the files and folders that flags name.

Only the first rank looks at files, for all ranks (`LaunchEnvironment.looks_at_files`).
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.core.declarations.config_fields import literal_text
from megatron.core.dist_checkpointing.checkpoint_selection import select_folders
from megatron.core.dist_checkpointing.folders import TRACKER, candidates
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import GROUPS_WITH_SETTINGS
from megatron.core.utils.communicator_settings import read_communicator_settings
from megatron.core.utils.store_path import place
from megatron.data.datasets.blend_stages import prefixes_of, read_stages_file
from megatron.data.datasets.index_format import check_bin_size
from megatron.data.datasets.object_store import exists, file_system, is_url
from megatron.data.datasets.utils import (
    Blend,
    get_blend_from_list,
    parse_split,
    read_blend_file,
    read_blend_per_split_file,
)
from megatron.data.evaluation.task_file import read_tasks
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.training.config.log import KINDS
from megatron.training.config.settings import Settings


def files_exist(s: Settings) -> Iterator[str]:
    """Every data file and tokenizer file exists."""
    if not s.launch_environment.looks_at_files:
        return
    if s.data_contract and s.dry_run:
        return  # a plan is dry before its data and tokenizer exist; the contract's lines say what is not there yet
    if s.data_contract and not Path(s.data_contract).is_file():
        yield "{data_contract}: no such file; tools/plan.py writes it beside run.yaml"
    read = s.build(TokenizerConfig).files
    for field in ("data_args_path", "per_split_data_args_path", "data_stages", "vocab_file", "merge_file"):
        path = getattr(s, field)
        if (
            path  # "" is the problem of `paths_are_not_empty`
            and not Path(path).is_file()
            and (field in read or field.startswith(("data_", "per_split_")))
        ):
            yield f"{{{field}}}: no such file"
    if "tokenizer_model" in read and s.tokenizer_model is not None and not Path(s.tokenizer_model).exists():
        yield "{tokenizer_model}: no such file or folder here; give a path, as nothing is downloaded"
    for source, prefixes_there in _sources_of_data(s):
        try:
            prefixes = prefixes_there()
        except UserError as error:
            yield literal_text(str(error))
            continue
        for prefix in prefixes:
            if not s.sft:
                yield from _data_set_exists(source, prefix)
            elif not Path(prefix).is_file():
                yield source + literal_text(f"{prefix}: no such file; --sft reads .jsonl and .parquet files")


def _sources_of_data(s: Settings) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yields pairs: the start of a problem, which names the flag that gives prefixes of data sets, and a function that
    returns these prefixes or raises UserError. Leaves out files with prefixes on ranks that do not look at files, and
    with --mock-data."""
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = getattr(s, field)
        spelling = literal_text("--" + field.replace("_", "-"))
        yield f"{spelling} ", partial(_prefixes_of_words, words, spelling)
    if s.mock_data or not s.launch_environment.looks_at_files:
        return
    readers: dict[str, Callable[[str], list[str]]] = {
        "data_args_path": lambda path: _prefixes([read_blend_file(path)]),
        "per_split_data_args_path": lambda path: _prefixes(read_blend_per_split_file(path)),
        "data_stages": lambda path: prefixes_of(read_stages_file(path)),
    }
    for field, reader in readers.items():
        path = getattr(s, field)
        if path and Path(path).is_file():
            yield f"{{{field}}}: ", partial(reader, path)


def _prefixes_of_words(words: list[str] | None, spelling: str) -> list[str]:
    return _prefixes([get_blend_from_list(words, spelling)])


def _prefixes(blends: Sequence[Blend | None]) -> list[str]:
    return list(dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend[0]))


def evaluation_tasks(s: Settings) -> Iterator[str]:
    """The file of --eval-tasks describes tasks, and their data files exist. The model predicts the next token."""
    if s.eval_tasks and s.model_family in ("bert", "t5"):
        yield f"{{eval_tasks:name}}: a {s.model_family.upper()} does not predict the next token of a text; leave it out"
    elif s.eval_tasks and s.launch_environment.looks_at_files:  # "" is the problem of `paths_are_not_empty`
        try:
            read_tasks(s.eval_tasks)
        except UserError as error:
            yield "{eval_tasks:name}: " + literal_text(str(error))


def settings_of_communicators(s: Settings) -> Iterator[str]:
    """The file of --nccl-communicator-config-path can be read and names known groups."""
    path = s.nccl_communicator_config_path
    if path and s.launch_environment.looks_at_files:  # "" is the problem of `paths_are_not_empty`
        try:
            read_communicator_settings(path, GROUPS_WITH_SETTINGS)
        except UserError as error:
            yield literal_text(str(error))


def checkpoints_in_a_store(s: Settings) -> Iterator[str]:
    """With --save in an object store, what a run writes besides its checkpoints has a local folder. The package of the
    store is there."""
    for field in ("save", "load", "pretrained_checkpoint"):
        url = getattr(s, field)
        if url and is_url(url):
            try:
                file_system(url)
            except UserError as error:
                yield f"{{{field}:name}} " + literal_text(str(error))
    if not s.save or not is_url(s.save):
        return
    for field in ("save_hf_interval", "log_progress", *(f"save_{kind}_interval" for kind in KINDS)):
        if getattr(s, field):
            yield f"{{{field}:name}} writes files under {{save}}, which must be a folder on disk for it"
    if s.profile and s.tensorboard_dir is None:
        yield "{profile:name} writes into {tensorboard_dir:name}: give one, since {save} is no folder on disk"
    if s.wandb_project and s.wandb_save_dir is None:
        yield "{wandb_project:name}: give {wandb_save_dir:name}, since {save} is no folder on disk"


def data_in_object_stores(s: Settings) -> Iterator[str]:
    """For data in an object store, a local folder is given for the order of samples. Conversations are local files."""
    for source, read in _sources_of_data(s):
        try:
            url = next(filter(is_url, read()), None)
        except UserError:  # `files_exist` reports it
            continue
        if url is None:
            continue
        if s.sft:
            yield source + literal_text(f"{url}: ") + "{sft:name} reads local files; copy them"
        elif s.data_cache_path is None:
            yield (
                source + literal_text(f"{url}: ") + "give {data_cache_path:name}, a local folder for the order of "
                "samples"
            )
        return


def split_has_training_data(s: Settings) -> Iterator[str]:
    """--split gives training a share of the data, unless nothing is trained or data is made up."""
    if s.split is None or s.skip_train or s.mock_data:
        return
    try:
        share = parse_split(s.split)[0]
    except UserError:
        return  # the config of the data reports it
    if share == 0:
        yield "{split} leaves no data for training; give a first share above 0, such as 969,30,1"


def validation_sets(s: Settings) -> Iterator[str]:
    """The data of --multiple-validation-sets has no weights, and each set has a name."""
    if not s.multiple_validation_sets:
        return
    if s.mock_data:
        yield "{multiple_validation_sets} needs data sets (--valid-data-path); {mock_data} makes up a single one"
    if (s.per_split_data_args_path or s.data_args_path or s.data_stages) is not None:
        return  # checked when the data sets are built
    field = "data_path" if s.data_path is not None else "valid_data_path"
    try:
        blend = get_blend_from_list(getattr(s, field))
    except UserError:
        return  # `files_exist` reports it
    if blend is None:
        return
    prefixes, weights = blend
    if weights is not None:
        yield f"{{multiple_validation_sets}}: {{{field}:name}} must be without weights, as each set has its own loss"
    elif s.validation_set_names is not None and len(s.validation_set_names) != len(prefixes):
        names = len(s.validation_set_names)
        yield f"{{validation_set_names}}: {names} names for the {len(prefixes)} sets of {{{field}}}"


def _data_set_exists(source: str, prefix: str) -> Iterator[str]:
    """Both files of a data set exist, and have their whole length unless they are objects in a store. A problem begins
    with `source`, the flag or file that gives the prefix. If both are missing, it offers prefixes with similar names;
    for the name of one of the files, their prefix; for a text file, the tool that prepares it."""
    if is_url(prefix):
        try:
            missing = [suffix for suffix in (".idx", ".bin") if not exists(prefix + suffix)]
        except UserError as error:
            yield source + literal_text(str(error))
            return
        if missing:
            yield source + literal_text(f"{prefix}{missing[0]}: no such object{_other_half(prefix, missing)}")
        return
    missing = [suffix for suffix in (".idx", ".bin") if not Path(prefix + suffix).is_file()]
    if missing:
        folder, name = Path(prefix).parent, Path(prefix).name
        near = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx") if path.name.startswith(name))
        hint = f"; there is {' and '.join(near[:3])}" if near and len(missing) == 2 else _other_half(prefix, missing)
        if Path(prefix).is_file() and Path(name).suffix not in (".bin", ".idx"):
            yield source + literal_text(
                f"{prefix} is not prepared data; run tools/preprocess_data.py on it and give the prefix that it writes"
            )
            return
        if Path(prefix).is_file():
            hint = f"; give the prefix of both files, {folder / Path(name).stem}"
        elif re.fullmatch(r"[.0-9]+", prefix):
            hint = "; give prefixes alone, or a weight before each: WEIGHT PREFIX WEIGHT PREFIX"
        yield source + literal_text(f"{prefix}{missing[0]}: no such file{hint}")
        return
    try:
        check_bin_size(prefix)
    except UserError as error:
        yield source + literal_text(str(error))


def _other_half(prefix: str, missing: Sequence[str]) -> str:
    """Returns the end of a sentence about a data set of which one or both files are missing."""
    if len(missing) == 2:
        return "; give the prefix of the .bin and .idx files that tools/preprocess_data.py wrote"
    present = ".bin" if missing[0] == ".idx" else ".idx"
    return f", but {prefix}{present} exists; tools/preprocess_data.py writes both: copy both, or run it again"


def paths_are_not_empty(s: Settings) -> Iterator[str]:
    """No path is "", which a shell makes of an unset variable. It would mean the working folder."""
    for field in PATHS:
        value = getattr(s, field)
        if value == "" or (isinstance(value, list) and "" in value):
            yield f'{{{field}:name}} "" is an empty path, perhaps from a shell variable that is not set; give a path'


PATHS = (
    *("save", "load", "pretrained_checkpoint", "load_hf"),
    *("data_path", "train_data_path", "valid_data_path", "test_data_path"),
    *("data_args_path", "data_stages", "per_split_data_args_path"),
    *("data_cache_path", "data_contract", "object_storage_cache_path"),
    *("vocab_file", "merge_file", "tokenizer_model"),
    *("metrics_path", "nonfinite_dump_dir", "tensorboard_dir", "nccl_communicator_config_path"),
)
"""Fields that name files and folders."""


def folders_are_folders(s: Settings) -> Iterator[str]:
    """No folder is a file, and no folder of checkpoints is one of the checkpoints in it."""
    if not s.launch_environment.looks_at_files:
        return
    for field in ("tensorboard_dir", "wandb_save_dir", "data_cache_path", "nonfinite_dump_dir"):
        path = getattr(s, field)
        if path and Path(path).is_file():
            yield f"{{{field}}} is a file; give a folder"
    for field in ("save", "load", "pretrained_checkpoint"):
        path = getattr(s, field)
        if not path or not Path(path).exists():
            continue
        one = re.fullmatch(r"iter_(\d{7,})|release", Path(path).resolve().name)
        if not Path(path).is_dir():
            yield f"{{{field}}} is a file; give the folder of the checkpoints"
        elif one and (Path(path) / MANIFEST).is_file():
            step = f" and {{ckpt_step:name}} {int(one[1])}" if one[1] and field == "load" else ""
            parent = literal_text(str(Path(path).parent))
            yield f"{{{field}}} is one checkpoint; give the folder that it is in: {parent}{step}"


def folders_can_be_written(s: Settings) -> Iterator[str]:
    """The folders of --save and of the log can be made or written to. Not checked in a dry run, which writes nothing.

    The last pipeline stage writes the log, perhaps on a machine with other folders, so the log's are checked only if
    there is one stage.
    """
    if s.dry_run or not s.launch_environment.looks_at_files:
        return
    folders = {"save": s.save}
    if s.pipeline_model_parallel_size == 1:
        folders["tensorboard_dir"] = s.tensorboard_dir
        folders["wandb_save_dir"] = s.wandb_save_dir if s.wandb_project else None
        if s.is_given("metrics_path") and s.metrics_path:
            folders["metrics_path"] = os.path.dirname(s.metrics_path) or "."
            if Path(s.metrics_path).is_dir():
                yield "{metrics_path} is a folder; give a file"
    for field, folder in folders.items():
        if field == "save" and folder and is_url(folder):
            continue  # the first save shows it
        if folder and not Path(folder).is_file():  # which is the problem of `folders_are_folders`
            yield from _can_be_written(field, Path(folder))


def _can_be_written(field: str, folder: Path) -> Iterator[str]:
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing.is_dir():
        yield f"{{{field}}}: " + literal_text(f"{existing} is a file, not a folder; give another path")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{{{field}}}: " + literal_text(f"no permission to write in {existing.absolute()}; give another path")
    else:
        try:  # os.access allows root everything, in /proc and /sys too
            with TemporaryDirectory(prefix=".try-", dir=existing):
                pass
        except OSError as error:
            reason = f"no folder can be made in {existing.absolute()} ({error.strerror}); give another path"
            yield f"{{{field}}}: " + literal_text(reason)


def checkpoint_folders_exist(s: Settings) -> Iterator[str]:
    """A folder that must contain a checkpoint exists and contains one. Loading checks the checkpoint itself.

    A run that resumes from --load no longer needs --pretrained-checkpoint.
    """
    if not s.launch_environment.looks_at_files:
        return
    if s.load is not None and place(s.load).is_dir():
        if s.exit_on_missing_checkpoint and s.pretrained_checkpoint is None and _has_no_checkpoint(s):
            yield "{load} holds no checkpoint, and {exit_on_missing_checkpoint:name} is given"
    elif s.pretrained_checkpoint is not None:
        if not place(s.pretrained_checkpoint).exists():
            yield "{pretrained_checkpoint}: no such folder"
    elif s.load is not None and not place(s.load).exists() and s.exit_on_missing_checkpoint:
        yield "{load}: no such folder, and {exit_on_missing_checkpoint:name} is given"


def _has_no_checkpoint(s: Settings) -> bool:
    """Whether the run finds no checkpoint: --load has none and no tracker file, and no other folder can have one."""
    root = place(s.load)
    may_be_elsewhere = s.dry_run or s.moe_use_upcycling or s.non_persistent_save_interval is not None
    return not may_be_elsewhere and s.ckpt_step is None and not candidates(root) and not (root / TRACKER).exists()


def checkpoint_can_be_selected(s: Settings) -> Iterator[str]:
    """The folder of --load, otherwise of --pretrained-checkpoint, has the checkpoint of --ckpt-step, or any that this
    program can read.

    Not checked in a dry run, which may be on another machine; with --use-checkpoint-args, which has read a checkpoint
    before; and with temporary checkpoints, which may be in another folder.
    """
    field = "pretrained_checkpoint" if s.load is None else "load"
    root = getattr(s, field)
    if not s.launch_environment.looks_at_files or not root or not place(root).is_dir():
        return
    if s.dry_run or s.use_checkpoint_args or s.moe_use_upcycling:
        return
    if s.ckpt_step is None and s.non_persistent_save_interval is not None:
        return
    try:
        select_folders(place(root), s.ckpt_step)
    except UserError as error:
        yield f"{{{field if s.ckpt_step is None else 'ckpt_step'}:name}}: " + literal_text(str(error))
