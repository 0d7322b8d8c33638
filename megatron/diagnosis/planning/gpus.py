"""GPUs by name: memory, peaks and achieved rates, each with its source and error. The table is gpus.toml beside this
file; a user's file of the same form describes other GPUs."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.figures import Figure

_TABLE = Path(__file__).with_name("gpus.toml")


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. Rates are in floating point operations or bytes a second; None: not known."""

    name: str
    title: str
    multiprocessors: int
    memory: Figure
    """Bytes that programs can use."""
    bf16_peak: Figure
    bf16_products: Figure
    """Large matrix products at the power limit."""
    attention_64: Figure
    """Causal attention, forward and backward: rows of 4,096 tokens, heads of 64 channels."""
    attention_128: Figure
    """Causal attention with rows of 8,192 tokens and heads of 128 channels."""
    copy: Figure
    """Bytes that a copy in the GPU's memory reads and writes."""
    layer_launch: Figure
    """Seconds in which a host starts the kernels of a layer, forward and backward."""
    fp8_peak: Figure | None = None
    fp8_products: Figure | None = None
    nvlink: Figure | None = None
    """Bytes that a GPU sends while it receives as many."""
    collectives: Figure | None = None
    """Bytes that a GPU sends in NCCL's collectives within its NVLink domain."""
    pcie: Figure | None = None
    """Bytes that a GPU sends to GPUs of its node that no NVLink connects."""
    nic: Figure | None = None
    """Bytes that a GPU sends to other nodes."""
    gpus_per_nvlink_domain: int | None = None
    """None: all GPUs of a node."""

    def peak(self, fp8: bool) -> Figure | None:
        """Returns the peak that a run's model FLOPs utilisation refers to."""
        return self.fp8_peak if fp8 else self.bf16_peak


def gpu_named(name_or_file: str) -> Gpu:
    """Returns a GPU of the table, by its name or the first words of it if only one GPU has them (a100-80gb), or the GPU
    that a TOML file describes. Raises UserError with the known names otherwise."""
    wanted = name_or_file.lower().replace("_", "-").replace(" ", "-")
    known = _known()
    if wanted in known:
        return known[wanted]
    if wanted in _ALIASES:
        return known[_ALIASES[wanted]]
    path = Path(name_or_file)
    if path.is_file():
        return _only_gpu(path)
    raise UserError(
        f"--gpu {name_or_file}: no such GPU and no such file; known are {', '.join(known)}; others are described in a "
        "TOML file"
    )


_ALIASES = {"a100": "a100-80gb", "h100-sxm": "h100", "h200-sxm": "h200", "4090": "rtx-4090", "rtx4090": "rtx-4090"}


@functools.cache
def _known() -> Mapping[str, Gpu]:
    return {name: _gpu(name, entry, str(_TABLE)) for name, entry in tomllib.loads(_TABLE.read_text("utf-8")).items()}


def known_gpus() -> tuple[str, ...]:
    """Returns the names of the table."""
    return tuple(_known())


def _only_gpu(path: Path) -> Gpu:
    try:
        entries = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"--gpu {path}: this file cannot be read as TOML: {error}") from None
    if len(entries) != 1 or not isinstance(next(iter(entries.values())), dict):
        raise UserError(f"--gpu {path}: expected one table, such as [my-gpu], and found {len(entries)}")
    ((name, entry),) = entries.items()
    return _gpu(name, entry, str(path))


def _gpu(name: str, entry: Mapping[str, object], path: str) -> Gpu:
    known = {field.name: field for field in fields(Gpu) if field.name != "name"}
    for key in entry:
        if key not in known:
            raise UserError(f"--gpu {path}: [{name}] has the unknown key {key}; known are {', '.join(known)}")
    missing = [key for key in _REQUIRED if key not in entry]
    if missing:
        raise UserError(f"--gpu {path}: [{name}] lacks {', '.join(missing)}")
    values: dict[str, Any] = {
        key: value if key in _PLAIN else _figure(path, name, key, value) for key, value in entry.items()
    }
    for key, kind in _PLAIN.items():
        if key in values and (not isinstance(values[key], kind) or values[key] in ("", 0)):
            raise UserError(f"--gpu {path}: [{name}] {key} = {values[key]!r}: expected {_WORDS[kind]}")
    return Gpu(name=name, **values)


_PLAIN: Mapping[str, type] = {"title": str, "multiprocessors": int, "gpus_per_nvlink_domain": int}
_WORDS = {str: "a text", int: "a number of 1 or more"}
_REQUIRED = (
    "title",
    "multiprocessors",
    "memory",
    "bf16_peak",
    "bf16_products",
    "attention_64",
    "attention_128",
    "copy",
    "layer_launch",
)


def _figure(path: str, name: str, key: str, entry: object) -> Figure:
    form = '{value = 1e12, error = 0.1, source = "..."}'
    if not isinstance(entry, dict) or set(entry) != {"value", "error", "source"}:
        raise UserError(f"--gpu {path}: [{name}] {key}: expected {form}")
    value, error, source = entry["value"], entry["error"], entry["source"]
    numbers = all(isinstance(number, int | float) and not isinstance(number, bool) for number in (value, error))
    if not numbers or value <= 0 or not 0 <= error < 1 or not isinstance(source, str) or not source:
        raise UserError(f"--gpu {path}: [{name}] {key}: expected {form}, with a positive value and an error below 1")
    return Figure(float(value), source, float(error))
