"""The scripts of this folder import, read and call everything that Megatron-LM's own do, as the list of facts says."""

import ast
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.user_scripts import LOOP_RELEASES, RELEASES, ROOT, script

FACTS: list[dict[str, Any]] = json.loads((ROOT / "tests/data/megatron_lm_script_names.json").read_text())
PATCH = {"0.11": "0.11.0", "0.16": "0.16.1"}
FILES = [
    *((release, f"pretrain_{kind}") for kind in ("gpt", "bert", "t5") for release in RELEASES),
    *((release, "run_simple_mcore_train_loop") for release in LOOP_RELEASES),
    *((release, name) for name in ("gpt_builders", "model_provider") for release in ("0.15", "0.16")),
]
NOT_USED = {
    "megatron.core.models.gpt.GPTModel.vp_stage": "read by its name in a string",
    "megatron.core.models.gpt.GPTModel.__call__": "called by another name",
    "megatron.core.pipeline_parallel.schedules.forward_backward_func": "the name of a result",
    "megatron.core.timers.Timers.__call__": "called by another name",
    "megatron.core.transformer.transformer_block.TransformerBlockSubmodules.layer_specs": "read by hasattr",
    "megatron.core.utils.StragglerDetector.__call__": "called by another name",
    "megatron.core.utils.StragglerDetector.__enter__": "a with statement",
    "megatron.core.utils.StragglerDetector.__exit__": "a with statement",
}
"""Facts that the text of a script does not show, and why."""
UNREACHABLE = ("megatron.post_training", "args.memory_snapshot_path")
"""Beginnings of names behind packages that are not here, and behind running out of GPU memory."""


@dataclass
class Used:
    """What the text of a script uses."""

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    arguments: set[str] = field(default_factory=set)
    calls: set[tuple[str, int, str]] = field(default_factory=set)
    """Last word of the function's name, arguments by position, keywords."""


@cache
def used_by(path: str) -> Used:
    tree, used, homes = ast.parse(Path(path).read_text()), Used(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                used.names.add(name.name)
                homes[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                used.names.add(f"{node.module}.{name.name}")
                homes[name.asname or name.name] = f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.attributes.add(node.attr)
            words, root = _words(node)
            if root == "args":
                used.arguments.add(words[0])
            if root in homes:
                used.names.add(".".join([homes[root], *words]))
        elif isinstance(node, ast.Call):
            words, root = _words(node.func)
            last = (words or homes.get(root, root).split(".")[-1:])[-1]
            used.calls.add((last, len(node.args), " ".join(sorted(word.arg or "**" for word in node.keywords))))
            if root == "getattr" and isinstance(node.args[1], ast.Constant):
                used.arguments.add(str(node.args[1].value))
    return used


def _words(node: ast.expr) -> tuple[list[str], str]:
    """The attributes of a dotted name in their order, and the name that they begin with."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.insert(0, node.attr)
        node = node.value
    return words, node.id if isinstance(node, ast.Name) else ""


def lacking(path: str, name: str, release: str) -> list[str]:
    """The facts about a script of Megatron-LM that a script of this folder does not show."""
    used, release = used_by(path), PATCH.get(release, f"{release}.0")
    found = []
    for fact in FACTS:
        if release not in fact.get("where", {}).get(name, fact["releases"] if name in fact["scripts"] else []):
            continue
        home, last = fact["name"], fact["name"].split(".")[-1]
        if home.startswith(UNREACHABLE) or home in NOT_USED:
            continue
        if home.startswith("args."):
            found += [home] * (last not in used.arguments)
            continue
        other = home.replace("megatron.core.parallel_state", "megatron.core.mpu")
        found += [home] * (not {home, other} & used.names and last not in used.attributes)
        for of, releases, positional, keywords in fact.get("calls", []):
            if of == name and release in releases and (last, positional, keywords) not in used.calls:
                found.append(f"{home}({positional} by position, {keywords})")
    return found


@pytest.mark.parametrize(("release", "name"), FILES)
def test_a_script_uses_all_that_it_should(release: str, name: str) -> None:
    assert lacking(script(release, f"{name}.py"), name, release) == []


def test_what_is_left_out_is_noticed(tmp_path: Path) -> None:
    text = Path(script("0.16", "gpt_builders.py")).read_text()
    for old, new, said in (
        ("args.qk_l2_norm", "False", "args.qk_l2_norm"),
        ("use_kitchen=config.use_kitchen,", "", "megatron.core.transformer.transformer_config.TransformerConfig.use_k"),
        ("from megatron.training.yaml_arguments import core", "core", "megatron.training.yaml_arguments"),
    ):
        copy = tmp_path / f"{len(said)}.py"
        copy.write_text(text.replace(old, new).replace("core_transformer_config_from_yaml", "from_yaml", 1))
        assert any(line.startswith(said) for line in lacking(str(copy), "gpt_builders", "0.16")), said
