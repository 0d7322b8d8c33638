"""The tree of tests mirrors the package: tests/core/x/test_y.py tests megatron/core/x/y.py."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NOTHING_TO_TEST = {
    "core/declarations/enums.py": "an enum",
    "core/exceptions.py": "an exception without code",
    "core/micro_batch.py": "a record and a protocol, without code",
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
_PLANNED = "checklist", "contract", "exact_cost", "mapping", "plan", "report", "run_file", "settings_of_run"
_FAMILIES = (
    *("arcee", "bamba", "cohere", "ernie", "ernie_moe", "exaone4", "glm", "glm4_moe", "gpt_bigcode", "gpt_neox"),
    *("granite_moe", "llama4", "minimax_m2", "nemotron", "phi", "qwen2_moe", "qwen3_5", "seed_oss", "smollm3"),
    "starcoder2",
)
TESTED_TOGETHER = {
    "conversion/test_against_transformers.py": {f"conversion/{name}.py" for name in _FAMILIES},
    "training/config/test_impossible_values.py": {f"training/config/{part}.py" for part in _PARTS},
    "core/transformer/config/test_impossible_values.py": {f"core/transformer/config/{name}.py" for name in _FIELDS},
    "conversion/test_bert.py": {"conversion/modernbert.py"},
    "training/launch/test_environment.py": {"training/providers.py"},
    "conversion/test_config_rules.py": {"conversion/layer_rules.py"},
    "conversion/test_remote_code.py": {"conversion/baichuan.py", "conversion/chatglm.py"},
    "diagnosis/memory/test_peak.py": {"diagnosis/memory/picture.py"},
    "diagnosis/planning/test_layouts.py": {"diagnosis/planning/ranking.py", "diagnosis/planning/rough_cost.py"},
    "diagnosis/planning/test_model_shape.py": {f"diagnosis/planning/{name}.py" for name in _COUNTS},
    "diagnosis/planning/test_specification.py": {f"diagnosis/planning/{name}.py" for name in _READING},
    "tools/test_plan.py": {f"diagnosis/planning/{name}.py" for name in _PLANNED},
    "core/ops/test_kernels_triton.py": {f"core/{file}" for file in _KERNELS},
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
