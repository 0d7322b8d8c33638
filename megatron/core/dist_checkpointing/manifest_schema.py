"""What the JSON files of a checkpoint must look like. Every reader of a manifest or an index uses these schemas."""

from typing import Any

from megatron.core.dist_checkpointing.data_file import DTYPES
from megatron.core.schedule.optimizer_param_scheduler import DECAY_STYLES, WD_STYLES
from megatron.core.utils.json_schema import (
    Boolean,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    Number,
    OneOf,
    Plain,
    Record,
    Text,
)

_CRC32 = Integer(0, (1 << 32) - 1)
_COUNT, _INT32 = Integer(), Integer(-(1 << 31), (1 << 31) - 1)
_WORD = Text(one_line=True)
_SIZES = ListOf(Integer(0, 1 << 48))

CHUNK = Record(
    {
        "name": _WORD,
        "global_shape": _SIZES,
        "box": Record({"start": _SIZES, "shape": _SIZES}),
        "range": ListOf(_COUNT, 2),
        "dtype": OneOf(tuple(DTYPES)),
        "key": _WORD,
        "offset": _COUNT,
        "checksums": ListOf(_CRC32),
    }
)
INDEX = Record({"data_file": _WORD, "data_size": _COUNT, "header_crc32": _CRC32, "chunks": ListOf(CHUNK)})
"""The index of a rank. `block_bytes` is compared with that of this release."""

MANIFEST = Record(
    {
        "iteration": _COUNT,
        "indexes": MapOf(Record({"size": _COUNT, "sha256": Text()})),
        "common": MapOf(Plain()),
        "config": MapOf(Plain()),
        "layout": MapOf(Integer(1)),
    },
    optional={"weights_finite": Nullable(Boolean())},
)

_NUMBER = Number(0.0)
TRAIN_STATE = Record(
    optional={
        "iteration": _COUNT,
        "consumed_train_samples": _COUNT,
        "skipped_train_samples": _COUNT,
        "consumed_valid_samples": _COUNT,
        "consumed_tokens": Integer(0, 1 << 62),
        "floating_point_operations_so_far": _NUMBER,
    }
)
# A fraction of the run may be warm-up, so numbers of steps need not be whole.
_SCHEDULER = Record(
    optional={
        "max_lr": _NUMBER,
        "min_lr": _NUMBER,
        "lr_warmup_steps": _NUMBER,
        "lr_decay_steps": _NUMBER,
        "lr_decay_style": OneOf(DECAY_STYLES),
        "num_steps": _COUNT,
        "start_wd": _NUMBER,
        "end_wd": _NUMBER,
        "wd_incr_style": OneOf(WD_STYLES),
        "wd_incr_steps": _NUMBER,
    }
)
_SCALER = Record({"scale": Number(0.0, above=True)}, {"growth_tracker": _INT32, "hysteresis_tracker": _INT32})
_OPTIMIZER = Record(optional={"update_count": _COUNT, "grad_scaler": Nullable(_SCALER)})
_SPIKES = Record({"history": ListOf(Number()), "count": _COUNT, "in_row": _COUNT, "last_spike": _COUNT})
_REWIND = Record({"spike": _COUNT, "iteration": _COUNT, "first": _COUNT})

RUN_STATE = Record(
    {"train_state": TRAIN_STATE, "scheduler": _SCHEDULER, "optimizer": Nullable(_OPTIMIZER)},
    optional={"loss_spikes": Nullable(_SPIKES), "rewinds": ListOf(_REWIND), "earlier_run": ListOf(_COUNT)},
)
"""`common` of a run that can be continued. A script's own scheduler and optimizer may keep other values."""

DESCRIPTION = Record(
    optional={
        "command_line": ListOf(Text()),
        "model_family": Nullable(_WORD),
        "architecture": MapOf(Plain()),
        "torch": _WORD,
        "python": _WORD,
        "data": MapOf(Text()),
        "data_order": MapOf(Text()),
    }
)
"""`config` of a run."""


def problem_in_index(fields: object) -> str | None:
    """Returns what is wrong with the fields of an index; None if all fits."""
    return INDEX.problem(fields)


def problem_in_manifest(fields: Any) -> str | None:
    """Returns what is wrong with the fields of a manifest; None if all fits. The state in it is that of a run if
    `config` describes one; `dist_checkpointing.save` leaves `config` empty, and the state is the caller's own."""
    found = MANIFEST.problem(fields) or DESCRIPTION.problem(fields["config"], "config")
    if found is None and fields["config"] and "train_state" in fields["common"]:
        found = RUN_STATE.problem(fields["common"], "common")
    return found
