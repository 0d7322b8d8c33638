"""Megatron-LM's public names: every one can be imported from its home and takes its parameters.

The lists are facts about Megatron-LM: tests/data/megatron_lm_api.json (release 0.16.1, and names that published
recipes import beside them), and megatron_lm_script_names.json (what the entry scripts of releases 0.5 to 0.16 import
and rely on; the programs of tests/support/released make the calls of the list), and
megatron_lm_script_names_019.json (what those of release 0.19 call beside them; tests/facades/test_argument_utils.py).
What may change in them is in docs/api.md.
"""

import dataclasses
import enum
import importlib.util
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.each import for_each

from megatron.facades.pretrain import _pretrain_configured

DATA = Path(__file__).parent / "data"
NAMES: list[dict[str, Any]] = json.loads((DATA / "megatron_lm_api.json").read_text())
NAMES_019: list[dict[str, Any]] = json.loads((DATA / "megatron_lm_script_names_019.json").read_text())
SCRIPT_NAMES: list[dict[str, Any]] = json.loads((DATA / "megatron_lm_script_names.json").read_text())

COMPUTED_RANKS = "takes the ranks of a pipeline, under any parameter name"
OTHER_PARAMETERS = {
    ("megatron.core.parallel_state", "default_embedding_ranks"): COMPUTED_RANKS,
    ("megatron.core.parallel_state", "default_position_embedding_ranks"): COMPUTED_RANKS,
}
"""Functions that do not take Megatron-LM's parameters by name, and why."""

NO_SUCH_METHODS = {
    "ColumnParallelLinear": "backward_dw",
    "GPTModel": "build_schedule_plan preprocess_for_fine_grained_offloading",
    "MLP": "backward_dw",
    "MegatronModule": "set_is_first_microbatch set_symmetric_ar",
    "MegatronOptimizer": "clip_grad_norm count_zeros get_grad_norm get_grad_stats_parallel_group "
    "get_main_grads_for_grad_norm offload_to_cpu prepare_grads restore_from_cpu step_with_ready_grads",
    "MoELayer": "backward_dw combine dispatch postprocess preprocess route routed_experts_compute "
    "router_and_preprocess set_for_recompute_pre_mlp_layernorm shared_experts_compute",
    "SelfAttention": "backward_dw clip_qk run_realtime_tests set_for_recompute_input_layernorm",
    "TopKRouter": "apply_input_jitter apply_z_loss attach_and_log_load_balancing_loss sinkhorn_load_balancing",
    "TransformerLayer": "configure_fused_tp_inference create_mcore_cudagraph_manager get_layer_norm_weights "
    "get_layer_static_inputs get_mlp_layer_norm_weights get_qkv_layer_norm_weights",
}
"""Methods that Megatron-LM's own modules call on each other, and that these classes do not have."""

OTHER_METHODS = {
    ("CrossAttention", "get_query_key_value_tensors"): "has no output gate",
    ("Float16Module", "state_dict"): "hands all arguments on",
    ("MoELayer", "forward"): "layers take LayerInputs",
    ("SelfAttention", "get_query_key_value_tensors"): "layers take LayerInputs",
    ("TransformerBlock", "forward"): "layers take LayerInputs",
}
"""Methods that do not take Megatron-LM's parameters, and why."""


def find(entry: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(entry["module"]), entry["name"])


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package does not exist
        return False


def names_of(parameters: list[str]) -> list[str]:
    return [word.split(":")[0].split("=")[0].strip() for word in parameters if not word.startswith("*")]


def missing_parameters(function: Callable[..., Any], megatron_lm: list[str]) -> list[str]:
    """Megatron-LM's parameters that a function does not take, by name and, before a keyword-only one, by position."""
    ours = [parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != "self"]
    by_position = [parameter.name for parameter in ours if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    wanted = names_of(megatron_lm)
    absent = [name for name in wanted if name not in {parameter.name for parameter in ours}]
    return absent or [name for name, here in zip(wanted, by_position, strict=False) if name != here]


@for_each(NAMES, lambda entry: f"{entry['module']}.{entry['name']}")
def test_a_public_name_is_there_and_takes_its_parameters(entry: dict[str, Any]) -> None:
    found, kind = find(entry), entry.get("kind")
    if kind == "function" and (entry["module"], entry["name"]) not in OTHER_PARAMETERS:
        assert missing_parameters(found, entry["params"]) == []
    if "init" in entry:
        assert missing_parameters(found.__init__, entry["init"]) == []
    absent = NO_SUCH_METHODS.get(entry["name"], "").split()
    for method, parameters in entry.get("methods", {}).items():
        assert hasattr(found, method) != (method in absent), method
        if method not in absent and (entry["name"], method) not in OTHER_METHODS:
            assert missing_parameters(getattr(found, method), parameters) == [], method
    if kind == "dataclass" and dataclasses.is_dataclass(found):
        assert set(entry["fields"]) <= {field.name for field in dataclasses.fields(found)}
    elif kind == "dataclass":  # a record of our own with these fields
        found(**dict.fromkeys(entry["fields"]))
    if kind == "enum":
        assert issubclass(found, enum.Enum)
        assert {word.split(" =")[0] for word in entry["members"]} <= set(found.__members__)


IMPORTED = [
    entry
    for entry in SCRIPT_NAMES
    if entry["kind"] in ("module", "function", "class", "enum", "constant")
    and not entry["name"].endswith(".forward_backward_func")  # the name of a result
]


@for_each(IMPORTED, lambda entry: entry["name"])
def test_what_entry_scripts_import_can_be_imported(entry: dict[str, Any]) -> None:
    words = entry["name"].split(".")
    end = next(n for n in range(len(words), 0, -1) if is_module(".".join(words[:n])))
    found: Any = importlib.import_module(".".join(words[:end]))
    for word in words[end:]:
        found = getattr(found, word)


@for_each(NAMES_019, lambda entry: f"{entry['module']}.{entry['name']}")
def test_a_name_of_current_scripts_is_there_and_takes_its_parameters(entry: dict[str, Any]) -> None:
    """`pretrain` has two forms, and the signature that it shows is the older one."""
    found = _pretrain_configured if entry["name"] == "pretrain" else find(entry)
    if entry["kind"] != "object":
        assert missing_parameters(found, entry["parameters"]) == []


def test_a_changed_parameter_is_noticed() -> None:
    def ours(first: int, renamed: int, third: int = 0, *, own: int = 0) -> None: ...

    assert missing_parameters(ours, ["first: int", "second"]) == ["second"]
    assert missing_parameters(ours, ["renamed", "first"]) == ["renamed", "first"]
    assert missing_parameters(ours, ["first", "renamed", "third: int = 0"]) == []
