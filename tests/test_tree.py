"""The tree of tests mirrors the package: tests/core/x/test_y.py tests megatron/core/x/y.py."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NOTHING_TO_TEST = {
    "core/declarations/enums.py": "an enum",
    "core/exceptions.py": "an exception without code",
    "core/packed_seq_params.py": "Megatron-LM's record, without code",
    "core/utils/autograd_context.py": "the type of an argument, without code",
    "core/transformer/config/inference.py": "fields without code; test_transformer_config checks names and defaults",
    "core/transformer/enums.py": "enums",
}
"""Modules without a test file of their name, each with the reason. Give a new module a test file instead."""

_PARTS = "checkpoint", "data", "log", "model", "parallel", "resilience", "schedule", "training"
_KERNELS = re.findall(r'^    "(.*)": ', (ROOT / "tests/core/ops/test_kernels_triton.py").read_text(), flags=re.M)
_FIELDS = "architecture", "attention", "latent_attention", "low_precision", "memory", "moe", "positions"
_COUNTS, _READING = ("parameter_count", "published_models"), ("questions", "specification_text")
_NEMO_STEPS = "bases", "loss", "module_steps", "ranks"
_NEMO_FLAGS = (
    *("arguments", "data", "flags", "folders", "lr_scheduler", "model_flags", "optim", "precision", "trainer"),
    *("io", "run_callbacks", "trainer_flags"),
)
_PLANNED = "checklist", "contract", "exact_cost", "mapping", "plan", "report", "settings_of_run"
_FAMILIES = (
    *("bamba", "cohere", "ernie", "exaone4", "glm", "gpt_neox", "llama", "llama4", "minimax_m2", "phi", "seed_oss"),
    *("smollm3", "ungated"),
)
TESTED_TOGETHER = {
    "conversion/test_against_transformers.py": {f"conversion/{name}.py" for name in _FAMILIES},
    "training/config/test_impossible_values.py": {f"training/config/{part}.py" for part in _PARTS},
    "core/transformer/config/test_impossible_values.py": {f"core/transformer/config/{name}.py" for name in _FIELDS},
    "conversion/test_bert.py": {"conversion/modernbert.py"},
    "conversion/test_families.py": {f"conversion/{name}.py" for name in ("decoder", "gpt2", "phi3")},
    "conversion/test_layer_types.py": {"conversion/olmo.py"},
    "data/preparation/test_prepare.py": {f"data/preparation/{name}.py" for name in ("batches", "messages")},
    "data/tokenizer/test_build.py": {"data/tokenizer/config.py"},
    "data/tokenizer/test_byte_level.py": {"data/tokenizer/bpe_kernels.py"},
    "conversion/test_gguf.py": {"conversion/gguf_models.py"},
    "training/launch/test_environment.py": {"training/providers.py"},
    "training/test_delayed_weight_gradients.py": {"core/micro_batch.py"},
    "training/log/test_training_log.py": {"training/log/records.py"},
    "training/test_evaluate.py": {"training/evaluations.py"},
    "facades/nemo/lightning/test_strategy.py": {f"facades/nemo/lightning/{name}.py" for name in _NEMO_FLAGS},
    "facades/nemo/lightning/test_megatron_parallel.py": {f"facades/nemo/lightning/{name}.py" for name in _NEMO_STEPS},
    "facades/nemo/llm/test_gpt.py": {f"facades/nemo/llm/{name}.py" for name in ("api", "config", "data", "tokenizer")},
    "conversion/test_config_rules.py": {"conversion/layer_rules.py"},
    "conversion/test_remote_code.py": {"conversion/baichuan.py", "conversion/chatglm.py"},
    "conversion/megatron_lm/test_exporting.py": {
        f"conversion/megatron_lm/{name}.py" for name in ("dist_exporting", "exported_state", "exported_tensors")
    },
    "conversion/megatron_lm/test_plain_exporting.py": {"conversion/megatron_lm/numbered_state.py"},
    "diagnosis/memory/test_peak.py": {"diagnosis/memory/picture.py"},
    "diagnosis/planning/test_layouts.py": {"diagnosis/planning/ranking.py", "diagnosis/planning/rough_cost.py"},
    "diagnosis/planning/test_model_shape.py": {f"diagnosis/planning/{name}.py" for name in _COUNTS},
    "diagnosis/planning/test_specification.py": {f"diagnosis/planning/{name}.py" for name in _READING},
    "training/config/foreign/test_deepspeed.py": {
        f"training/config/foreign/{name}.py" for name in ("deepspeed_optimizer", "taking")
    },
    "training/config/foreign/test_accelerate.py": {"training/config/foreign/files.py"},
    "facades/test_hf_trainer.py": {"facades/hf_rows.py"},
    "test_programs.py": {"__main__.py"},
    "tools/test_plan.py": {f"diagnosis/planning/{name}.py" for name in _PLANNED},
    "core/inference/test_generation.py": {"core/transformer/recurrent_cache.py"},
    "core/inference/test_engine.py": {
        f"core/inference/{name}.py" for name in ("call_channel", "device_copies", "layout_forward")
    },
    "serving/test_api.py": {"serving/answers.py"},
    "serving/test_openai_requests.py": {"serving/json_fields.py"},
    "tools/test_serve.py": {"serving/serve.py"},
    "core/transformer/moe/test_moe_layer.py": {"core/transformer/moe/shared_experts.py"},
    "core/context_parallel/test_attention.py": {"core/context_parallel/ring.py"},
    "core/models/bert/test_bert_model_against_transformers.py": {
        f"core/models/bert/{name}.py" for name in ("bert_lm_head", "pooler")
    },
    "core/transformer/moe/test_token_dispatcher.py": {
        f"core/transformer/moe/{name}_dispatcher.py" for name in ("allgather", "alltoall", "flex")
    },
    "core/ops/test_kernels_triton.py": {f"core/{file}" for file in _KERNELS},
    "core/adapters/test_layers.py": {"core/adapters/attach.py", "core/adapters/config.py"},
    "training/test_adapters.py": {"training/config/adapter_checks.py"},
    "conversion/test_peft.py": {"conversion/merging.py"},
    "core/optimizer/test_flat_optimizer.py": {"core/optimizer/unit_state.py"},
}
"""Test files of several modules, each of which would have the same few lines, or which make one result together."""


def modules(package: Path) -> list[str]:
    found = (path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py")
    return sorted(found)


def untested(root: Path, exceptions: set[str]) -> list[str]:
    """Modules of root/megatron without a test file of their name in root/tests, but for the exceptions."""
    return [
        module
        for module in modules(root / "megatron")
        if module not in exceptions and not _test_of(root, module).exists()
    ]


def _test_of(root: Path, module: str) -> Path:
    path = root / "tests" / module
    return path.with_name(f"test_{path.name}")


def test_every_module_has_a_test_file_of_its_name() -> None:
    missing = untested(ROOT, {*NOTHING_TO_TEST}.union(*TESTED_TOGETHER.values()))
    assert not missing, f"modules without a test file: {', '.join(f'megatron/{module}' for module in missing)}"


def test_exceptions_are_modules() -> None:
    together = set().union(*TESTED_TOGETHER.values())
    assert (set(NOTHING_TO_TEST) | together) <= set(modules(ROOT / "megatron"))
    assert all((ROOT / "tests" / file).exists() for file in TESTED_TOGETHER)
    assert not [module for module in together if _test_of(ROOT, module).exists()]


@pytest.mark.parametrize(("tests", "missing"), [([], ["core/a.py", "core/b.py"]), (["test_a.py"], ["core/b.py"])])
def test_a_module_without_a_test_is_found(tmp_path: Path, tests: list[str], missing: list[str]) -> None:
    for folder in ("megatron/core", "tests/core"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("__init__.py", "a.py", "b.py", "c.py"):
        (tmp_path / "megatron/core" / name).touch()
    for name in tests:
        (tmp_path / "tests/core" / name).touch()
    assert untested(tmp_path, {"core/c.py"}) == missing


LINES_WITH_ANY = 1271
"""Lines of megatron/ that name `Any`. Lower it when there are fewer; a new value has a type, or is `object`."""


def test_any_becomes_rarer() -> None:
    lines = [line for path in (ROOT / "megatron").rglob("*.py") for line in path.read_text().splitlines()]
    untyped = [line for line in lines if re.search(r"\bAny\b", line)]
    assert len(untyped) <= LINES_WITH_ANY
    assert not [line for line in untyped if re.search(r"\bconfig: Any\b", line)]
