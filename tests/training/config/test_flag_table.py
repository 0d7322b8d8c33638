"""Every flag is in the frozen list, is Megatron-LM's or marked as ours, and does what its help says."""

import enum
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import for_each

from megatron.core.declarations.config_fields import value_text
from megatron.training.config.conditions import is_inert, is_to_come, needs_of, ways_of
from megatron.training.config.flag_table import SAME_THING, Flag, flag_table, flags_by_spelling
from megatron.training.config.flag_words import number, whole_number
from megatron.training.config.retired import RETIRED

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests/data/flags"
MEGATRON_LM = {row["flag"]: row for row in map(json.loads, (DATA / "megatron_lm_flags.jsonl").read_text().splitlines())}

OTHER_DEFAULT = {
    "--fim-eod-token": None,  # that of the tokenizer
    "--sft-tokenizer-prompt-format": "default",  # the tokenizer's own chat template, not that of one model
    "--ckpt-format": "safetensors",
    "--transformer-impl": "auto",
    "--distributed-backend": None,  # by device
    "--muon-tp-mode": "distributed",  # the answer of one process; blockwise depends on the layout
    "--is-hybrid-model": None,  # as false; the default of pretrain_mamba.py is true
    "--no-persist-layer-norm": True,  # the other way round in Megatron-LM: a flag that says no
    # None in Megatron-LM, which counts as false
    "--no-save-optim": False,
    "--no-save-rng": False,
    "--no-load-optim": False,
    "--no-load-rng": False,
    "--use-cpu-initialization": False,
}
MORE_CHOICES = {
    "--cuda-graph-impl": {"full_iteration"},  # of release 0.19
    "--moe-flex-dispatcher-backend": {"ncclep"},  # of release 0.19
    "--ckpt-format": {"safetensors", "zarr"},
    "--transformer-impl": {"auto", "triton"},
    "--tiktoken-pattern": {"v1", "v2"},
    "--sft-tokenizer-prompt-format": {"default", "identity", "nemotron-h-aligned", "nemotron-nano-v2"},
}
OTHER_ACTION = {"--no-persist-layer-norm", "--tokenizer-hf-no-include-special-tokens"}


def spellings() -> list[str]:
    return sorted(flags_by_spelling())


def test_the_list_of_options_is_frozen() -> None:
    """A new option is added to tests/data/flags/options.txt on purpose, or not at all."""
    assert spellings() == (DATA / "options.txt").read_text().split()


def test_every_frequently_used_flag_is_offered() -> None:
    offered = set(spellings()) | RETIRED
    assert set(json.loads((DATA / "frequent_flags.json").read_text())) <= offered


@for_each(sorted(MEGATRON_LM))
def test_a_flag_of_megatron_lm_has_its_facts(spelling: str) -> None:
    flag, facts = flags_by_spelling()[spelling], MEGATRON_LM[spelling]
    assert _plain(flag.default, spelling) == OTHER_DEFAULT.get(spelling, facts["default"])
    assert str(flag.nargs) == str(facts["nargs"])
    if spelling not in OTHER_ACTION:
        assert facts["action"] == _action(flag, spelling)
    if facts["choices"] is None:
        assert set(flag.choices or ()) == MORE_CHOICES.get(spelling, set())
    elif spelling != "--exit-signal":  # numbers in its parser, read by name there too
        megatron_lm = {str(choice).rpartition(".")[2] for choice in facts["choices"]}
        assert set(flag.choices or ()) == megatron_lm | MORE_CHOICES.get(spelling, set())
    if facts["type"] in ("int", "float") and not (flag.declaration.parse or flag.choices):
        assert flag.parse is {"int": whole_number, "float": number}[facts["type"]]


def _plain(default: Any, spelling: str) -> Any:
    if spelling == "--exit-signal":
        return int(default)
    if isinstance(default, torch.dtype):
        return {torch.float32: "fp32"}[default]
    return str(default) if isinstance(default, enum.Enum) else default


def _action(flag: Flag, spelling: str) -> str:
    if flag.switch is None:
        return "store"
    return "store_true" if flag.switch[spelling] else "store_false"


@for_each(flag_table().values(), lambda flag: flag.field)
def test_a_flag_says_what_it_means_and_stands_on_real_fields(flag: Flag) -> None:
    assert flag.help.endswith((".", ")")) and len(flag.help) < 420
    named = len(flag.declaration.only_with) + len(flag.declaration.or_with)
    assert len(needs_of(flag)) + len(ways_of(flag)) == named, f"{flag.field} depends on a field without a flag"
    for condition in (*needs_of(flag), *ways_of(flag)):
        known = condition.flag.choices or ("True", "None")
        assert condition.words == ("0",) or set(condition.words) <= {*known, "None"}, condition
    if flag.declaration.supported is not None:
        assert flag.default in flag.declaration.supported
    if flag.declaration.no_effect is not None:
        assert not flag.declaration.no_effect.endswith(".")


def test_every_flag_works_or_is_inert_or_to_come() -> None:
    counts = {"works": 0, "inert": 0, "to come": 0}
    for flag in flag_table().values():
        counts["to come" if is_to_come(flag) else "inert" if is_inert(flag) else "works"] += 1
    assert counts["works"] > 150 and sum(counts.values()) == len(flag_table())


def test_every_flag_that_works_is_read_by_somebody() -> None:
    """A value that nothing reads is not honoured, even if its help says so."""
    config_files = {"dry_run.py", "print_config.py", "arguments.py", "transformer_config.py", "optimizer_config.py"}
    sources = [*ROOT.glob("pretrain_*.py"), *(ROOT / "megatron").rglob("*.py")]
    sources.remove(ROOT / "megatron/data/tokenizer/config.py")
    text = "\n".join(
        path.read_text() for path in sources if "config" not in path.parts and path.name not in config_files
    )
    read = set(re.findall(r"(?:\.|(?:getattr\([\w.]*config|_holds\(config, layer_number), \")(\w+)", text))
    unread = [
        flag.spelling
        for flag in flag_table().values()
        if not (is_inert(flag) or is_to_come(flag) or flag.field in read)
    ]
    assert set(unread) == READ_WHEN_CONFIGS_ARE_MADE


READ_WHEN_CONFIGS_ARE_MADE = {
    "--group-query-attention", "--swiglu", "--squared-relu", "--quick-geglu", "--geglu", "--exact-geglu",
    "--openai-gelu",
    "--no-bias-gelu-fusion",
    "--init-method-xavier-uniform", "--encoder-num-layers", "--encoder-seq-length", "--init-method-std",
    "--mup-base-hidden-size", "--mup-base-head-dim", "--mup-output-mult", "--mup-embedding-mult",
    "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json",
    "--mup-attn-scale-power", "--hybrid-attention-ratio", "--hybrid-mlp-ratio", "--mamba-num-heads",
    "--embedding-init-method-std", "--recompute-activations",
    "--layout-invariant", "--use-checkpoint-args", "--ckpt-format", "--grad-reduce-in-bf16",
    "--use-tp-pp-dp-mapping", "--use-torch-fsdp2",
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--save-params-interval", "--save-wgrads-interval", "--save-dgrads-interval", "--save-activations-interval",
    "--save-tokens-per-expert-interval", "--fault-injector-fault-types", "--fault-injector-fault-probabilities",
    "--fault-injector-ranks",
    "--mtp-hybrid-override-pattern",
    "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-main-params-dtype", "--megatron-fsdp-grad-comm-dtype",
    "--expert-tensor-parallel-size", "--planned-world-size", "--allow-tensor-parallel-across-nodes",
    "--mtp-standalone", "--tokenizer-sentencepiece-legacy", "--config", "--deepspeed-config", "--accelerate-config",
    "--gradient-accumulation-steps",
    "--eval-global-batch-size", "--eval-micro-batch-size", "--fim-prefix-token", "--fim-middle-token",
    "--fim-suffix-token", "--bert-num-tokentypes",
    "--decoder-num-layers", "--encoder-pipeline-model-parallel-size", "--encoder-tensor-model-parallel-size",
    "--cuda-graph-scope", "--cuda-graph-modules",  # graph_parts
}  # fmt: skip


def test_enum_choices_go_by_name() -> None:
    flag = flags_by_spelling()["--attention-backend"]
    assert value_text(flag.parse("unfused")) == "unfused"
    with pytest.raises(ValueError, match="choose from flash, fused"):
        flag.parse("3")


OUT_OF_CHECKPOINTS = {
    "hybrid_layer_pattern mtp_hybrid_override_pattern heterogeneous_layers_config_encoded_json": "the model's layers",
    "vocab_file merge_file tokenizer_model tokenizer_special_tokens chat_template": "files of a tokenizer, as data",
    "data_path train_data_path valid_data_path test_data_path split data_args_path per_split_data_args_path "
    "data_stages validation_set_names": "data, to compute a run again",
    "fim_split_sample fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token fim_eod_token": "tokens",
    "step_batch_size_schedule": "numbers",
    "pipeline_model_parallel_layout cp_comm_type recompute_modules offload_modules cuda_graph_scope "
    "cuda_graph_modules lora_target_modules": "names of parts",
}
"""Free text that may come from a checkpoint, and what it is. No code, module, command, config file or path to write."""
ACTING = {"use_checkpoint_args", "print_config", "dry_run"} | {
    "gpus_per_node",
    "gpus_per_nvlink_domain",
    "allow_tensor_parallel_across_nodes",
}
"""Other flags that may not."""


def test_what_may_come_from_a_checkpoint():
    """A new flag with free text may not, unless its field says so; then it needs a reason here."""
    table = flag_table().values()
    free = {name for names in OUT_OF_CHECKPOINTS for name in names.split()}
    assert {flag.field for flag in table if flag.is_free_text and flag.from_checkpoint} == free
    assert {flag.field for flag in table if not flag.is_free_text and not flag.from_checkpoint} == ACTING
    never = ("spec", "config_file", "save", "load", "load_hf", "tensorboard_dir", "metrics_path", "data_cache_path")
    assert not any(flag_table()[field].from_checkpoint for field in never)


def test_they_are_fields_and_others() -> None:
    named = {*SAME_THING, *(other for others in SAME_THING.values() for other in others)}
    assert named <= flag_table().keys()
    assert not [field for field, others in SAME_THING.items() if field in others]
    assert "geglu" in SAME_THING["swiglu"] and "swiglu" in SAME_THING["geglu"]
