"""Rules about data and checkpoints: where they are, and whether they are there."""

from collections.abc import Iterator
from pathlib import Path

from megatron.core.datasets.utils import get_blend_from_list, parse_split
from megatron.core.exceptions import UserError
from megatron.training.config.settings import Settings


def sources(s: Settings) -> list[str]:
    """The fields that say where data is."""
    per_split = [f for f in ("train_data_path", "valid_data_path", "test_data_path") if getattr(s, f) is not None]
    whole = [f for f in ("data_path", "data_args_path", "per_split_data_args_path") if getattr(s, f) is not None]
    return whole + per_split[:1] + (["mock_data"] if s.mock_data else [])


def one_source(s: Settings) -> Iterator[str]:
    """Data is named in one way."""
    found = sources(s)
    if len(found) > 1:
        names = " and ".join(f"{{{field}:name}}" for field in found)
        yield f"{names} say in {len(found)} ways where data is; give one"
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if getattr(s, field) == []:
            yield f"{{{field}:name}}: a prefix is missing"
    whole = {"train_data_path", "per_split_data_args_path"} & set(found)
    if s.is_given("split") and whole:
        yield f"{{split}} does not go with {{{whole.pop()}:name}}, whose data is used whole; leave one out"


def split(s: Settings) -> Iterator[str]:
    """The shares are numbers, and there is something to share."""
    if s.split is not None:
        try:
            parse_split(s.split)
        except UserError as error:
            yield _literally(error)


def files_are_there(s: Settings) -> Iterator[str]:
    """Every file that a flag names."""
    if not s.launch_environment.looks_at_files:
        return
    for field in ("data_args_path", "per_split_data_args_path", "vocab_file", "merge_file"):
        path = getattr(s, field)
        if path is not None and not Path(path).is_file():
            yield f"{{{field}}}: no such file"
    if s.tokenizer_model is not None and not Path(s.tokenizer_model).exists():
        yield "{tokenizer_model}: no such file or folder"
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            blend = get_blend_from_list(getattr(s, field))
        except UserError as error:
            yield _literally(error)
            continue
        for prefix in blend[0] if blend is not None else ():
            yield from _prefix_is_there(field, prefix)


def _prefix_is_there(field: str, prefix: str) -> Iterator[str]:
    """A data set is two files; the nearest names are offered where there are none."""
    missing = [suffix for suffix in (".idx", ".bin") if not Path(prefix + suffix).is_file()]
    if missing:
        folder, name = Path(prefix).parent, Path(prefix).name
        near = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx") if path.name.startswith(name))
        hint = f"; there is {' and '.join(near[:3])}" if near and ".idx" in missing else ""
        text = f"{prefix}{missing[0]}: no such file{hint}".replace("{", "{{").replace("}", "}}")
        yield f"{{{field}:name}} {text}"


def loading(s: Settings) -> Iterator[str]:
    """What says how to load needs something to load."""
    for field in ("ckpt_step", "finetune", "exit_on_missing_checkpoint"):
        if getattr(s, field) not in (None, False) and s.load is None and s.pretrained_checkpoint is None:
            yield f"{{{field}}} needs {{load:name}}: the folder to load from"


def checkpoints_are_there(s: Settings) -> Iterator[str]:
    """A folder that must hold a checkpoint is there; whether it does is seen when it is read. A run that goes on from
    its own checkpoints no longer needs the one that it began from."""
    if not s.launch_environment.looks_at_files or (s.load is not None and Path(s.load).is_dir()):
        return
    if s.pretrained_checkpoint is not None:
        if not Path(s.pretrained_checkpoint).is_dir():
            yield "{pretrained_checkpoint}: no such folder"
    elif s.load is not None and s.exit_on_missing_checkpoint:
        yield "{load}: no such folder, and {exit_on_missing_checkpoint:name} is given"


def _literally(error: UserError) -> str:
    """A message that names no field of ours."""
    return str(error).replace("{", "{{").replace("}", "}}")
