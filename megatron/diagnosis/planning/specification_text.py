"""Reads a specification as people fill it in: plain text with headings and keys, or YAML with the same keys.

The result is the text of each key and where it stands; `specification` makes values of it.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.yaml_files import reading_yaml

HEADINGS = ("MODEL DEFINITION", "HARDWARE", "PARALLELISM", "DATA PIPELINE", "VALIDATION GATES")


@dataclass(frozen=True)
class Key:
    """A key of the specification."""

    field: str
    """Field of `Specification`; with dashes, the flag of tools/plan.py."""
    heading: str
    name: str
    """Name in the text."""
    others: tuple[str, ...] = ()
    """Other names that people give to it, in lower case."""


KEYS = (
    Key("architecture", HEADINGS[0], "Architecture", ("model", "model architecture")),
    Key("params", HEADINGS[0], "Parameter count", ("parameters", "params", "model size", "number of parameters")),
    Key("vocab_size", HEADINGS[0], "Vocabulary size", ("vocabulary", "vocab size", "vocab")),
    Key("seq_length", HEADINGS[0], "Max sequence length", ("sequence length", "seq length", "context length")),
    Key("objective", HEADINGS[0], "Training objective", ("objective",)),
    Key("framework", HEADINGS[0], "Framework", ("training framework",)),
    Key("gpus", HEADINGS[1], "Total GPUs", ("gpus", "number of gpus", "gpu count", "total gpu count")),
    Key("gpus_per_node", HEADINGS[1], "GPUs per node", ("gpus/node",)),
    Key("gpu", HEADINGS[1], "GPU type and memory", ("gpu type", "gpu", "gpu model")),
    Key("interconnect", HEADINGS[1], "Interconnect", ("network", "interconnects")),
    Key("tensor_parallel", HEADINGS[2], "Tensor parallelism", ("tensor parallel", "tp", "tensor parallel size")),
    Key("pipeline_parallel", HEADINGS[2], "Pipeline parallelism", ("pipeline parallel", "pp")),
    Key("context_parallel", HEADINGS[2], "Context parallelism", ("context parallel", "cp")),
    Key("expert_parallel", HEADINGS[2], "Expert parallelism", ("expert parallel", "ep")),
    Key("data_parallel", HEADINGS[2], "Data parallelism", ("data parallel", "dp")),
    Key("zero_stage", HEADINGS[2], "ZeRO stage", ("zero", "zero optimizer stage")),
    Key("packing", HEADINGS[2], "Sequence packing", ("packing",)),
    Key("tokenizer", HEADINGS[3], "Tokenizer", ()),
    Key("deduplication", HEADINGS[3], "Deduplication method", ("deduplication", "dedup", "dedup method")),
    Key("data_mix", HEADINGS[3], "Data mix", ("mix", "data mixture", "mixture")),
    Key("tokens", HEADINGS[3], "Total tokens", ("tokens", "training tokens", "total training tokens")),
    Key("throughput", HEADINGS[4], "Throughput target", ("throughput",)),
    Key("checkpoint_interval", HEADINGS[4], "Checkpoint interval", ("checkpointing interval", "save interval")),
    Key("memory_utilization", HEADINGS[4], "Max memory utilization", ("memory utilization", "max memory")),
    Key("loss_check", HEADINGS[4], "Loss curve check", ("loss check", "loss curve")),
)
"""All keys, in the order of a specification."""

KEY_OF_FIELD = {key.field: key for key in KEYS}
_KEY_OF_NAME = {name: key for key in KEYS for name in (key.name.lower(), key.field.replace("_", " "), *key.others)}


@dataclass(frozen=True)
class Answer:
    """The text that specifies a key."""

    text: str
    where: str
    """File and line, or the flag, for messages."""


@dataclass(frozen=True)
class Answers:
    """What a specification says, key by key."""

    of_field: Mapping[str, Answer]
    notes: tuple[str, ...] = ()
    """Lines of the specification that were not read."""


def read_answers(path: str, text: str) -> Answers:
    """Reads the text of a specification; `path` is its name in messages, and says by .yaml, .yml or .json that it is
    YAML. Raises UserError for keys and headings that do not exist, and for keys with two answers."""
    if Path(path).suffix.lower() in (".yaml", ".yml", ".json"):
        return _collect(_of_yaml(path, text), [])
    notes: list[str] = []
    return _collect(_of_text(path, text, notes), notes)


def is_blank(text: str) -> bool:
    """Whether a value is not specified: empty, or a place holder in brackets such as [your GPU count]."""
    return not text or bool(re.fullmatch(r"[\[<{(].*[\]>})]|\.{3}|_+|\?+|-+|tbd|n/?a|none given|null", text, re.I))


def _collect(pairs: Iterator[tuple[Key, Answer]], notes: list[str]) -> Answers:
    found: dict[str, Answer] = {}
    for key, answer in pairs:
        earlier = found.setdefault(key.field, answer)
        if earlier.text != answer.text:
            raise UserError(
                f"{answer.where}: {key.name} is {answer.text} here and {earlier.text} in {earlier.where}; give it once"
            )
    return Answers({field: answer for field, answer in found.items() if not is_blank(answer.text)}, tuple(notes))


def _key_named(name: str, where: str) -> Key:
    plain = re.sub(r"[\[(].*?[\])]", "", name).strip(" *_`").lower()
    plain = re.sub(r"[\s_-]+", " ", plain)
    if plain in _KEY_OF_NAME:
        return _KEY_OF_NAME[plain]
    near = difflib.get_close_matches(plain, _KEY_OF_NAME, 1, 0.5)
    hint = f"; nearest: {_KEY_OF_NAME[near[0]].name}" if near else f"; keys are {', '.join(key.name for key in KEYS)}"
    raise UserError(f"{where}: a specification has no key {name.strip()!r}{hint}")


# ---------------------------------------------------------------------------------------------------------------------
# Plain text


def _of_text(path: str, text: str, notes: list[str]) -> Iterator[tuple[Key, Answer]]:
    """Yields keys and answers line by line. Bullets, # and bold marks of Markdown are left out. A heading is a known
    one, with or without text in brackets; another line in capitals is taken for a misspelled heading."""
    in_section = False
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), 1):
        where = f"{path}:{number}"
        plain = re.sub(r"^\s*(?:[-*•·>]\s+|#+\s*|\d+[.)]\s+)*", "", line).replace("**", "").strip()
        if not plain or set(plain) <= set("-=_*# "):
            continue
        name, colon, value = _split(plain)
        if _is_heading(plain, where):
            in_section = True
        elif (colon and in_section) or (colon and re.sub(r"\s*[\[(].*", "", name).strip().lower() in _KEY_OF_NAME):
            yield _key_named(name, where), Answer(value.strip().strip("`").strip(), where)
        else:
            notes.append(f"{where}: not read, as it is no heading and no `key: value`: {plain[:60]}")


def _split(line: str) -> tuple[str, str, str]:
    """Divides a line at its first colon or = that is not in brackets."""
    depth = 0
    for place, letter in enumerate(line):
        depth += (letter in "([") - (letter in ")]")
        if letter in ":=" and depth <= 0:
            return line[:place], letter, line[place + 1 :]
    return line, "", ""


def _is_heading(line: str, where: str) -> bool:
    plain = re.sub(r"\s*[\[(].*", "", line).strip(" :-=_").upper()
    if plain in HEADINGS:
        return True
    if plain == line.strip(" :-=_") and re.fullmatch(r"[A-Z][A-Z &/]{5,}", plain):
        near = difflib.get_close_matches(plain, HEADINGS, 1, 0.0)[0]
        raise UserError(f"{where}: a specification has no heading {plain}; nearest: {near}")
    return False


# ---------------------------------------------------------------------------------------------------------------------
# YAML


def _of_yaml(path: str, text: str) -> Iterator[tuple[Key, Answer]]:
    """Yields keys and answers. Headings are optional mappings; a data mix may be a mapping of ratios by source."""
    with reading_yaml(path) as yaml:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}: expected keys and values, such as Total GPUs: 64")
    for name, value in root.value:
        where = f"{path}:{name.start_mark.line + 1}"
        if not isinstance(name, yaml.ScalarNode):
            raise UserError(f"{where}: expected a key, such as Total GPUs")
        plain = re.sub(r"[\s_]+", " ", re.sub(r"\s*[\[(].*", "", name.value)).strip().upper()
        if plain in HEADINGS:
            if not isinstance(value, yaml.MappingNode):
                if isinstance(value, yaml.ScalarNode) and not value.value:
                    continue
                raise UserError(f"{where}: expected keys and values under {plain}")
            entries = value.value
        else:
            entries = [(name, value)]
        for key, node in entries:
            where = f"{path}:{key.start_mark.line + 1}"
            yield _key_named(str(key.value), where), Answer(_text_of(yaml, node, where), where)


def _text_of(yaml: Any, node: object, where: str) -> str:
    """Returns a value as text: a list or a mapping in one line."""
    if isinstance(node, yaml.ScalarNode):
        return "" if node.tag == "tag:yaml.org,2002:null" else str(node.value).strip()
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        if len(node.value) == 1 and node.flow_style:
            return f"[{node.value[0].value}]"  # a place holder in brackets
        return ", ".join(item.value for item in node.value)
    if isinstance(node, yaml.MappingNode) and all(isinstance(item, yaml.ScalarNode) for _, item in node.value):
        return ", ".join(f"{key.value}: {item.value}" for key, item in node.value)
    raise UserError(f"{where}: expected a value, or a list or mapping of plain values")
