"""Every Triton kernel compiles to machine code of Hopper GPUs, within their shared memory, on a machine without one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import compile_for_hopper

import megatron.core

CORE = Path(megatron.core.__file__).parent
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program can have on Hopper (CUDA C programming guide, compute capability 9.0)."""
ATTENTION = (
    "triton_agreement.masks",
    # The interpreter does not run these kernels. It runs those of `packed, dropped`, which the slow test compiles.
    "flash_agreement.attention_of:causal, dropped",
)
CHECKS = {
    "triton_agreement": "masks bias_dropout_residual losses merged_blocks largest_logits",
    "elementwise_kernels": "norms norms_of_views norms_with_residual positions normed_positions "
    "heads_of_a_projection gated_outputs sums table_rows biases updates stored_updates",
    "expert_kernels": "moves places choices weights_of_choices counted_choices parts_of_numbers activations products "
    "specialized_products accumulations linears biases",
    "shared_kernels": "shared_outputs shared_inputs",
    "delta_rule_kernels": "packed long_rows",
    "muon_kernels": "symmetric_products matrices_of_several_shapes products_in_two_parts updates updates_of_runs",
    "selected_keys": "scores masks",
    "recurrent_kernels": "convolutions gated_norms projections rounded_scans",
    "fp8_kernels": "largest_values noted_values noted_rows casts by_largest blocks",
    "fp8_grouped_kernels": "largest_values casts by_largest blocks products weight_gradients",
    "fp8_weights": "quantised_parts transposed",
    "fp8_tiles": "tiles small_specialized_blocks",
}


def compiled(checks: list[str], cache: Path) -> list[dict[str, Any]]:
    """Returns what each kernel that the checks call needs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    words = [sys.executable, compile_for_hopper.__file__, *checks]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found and all(kernel["shared"] <= MOST_SHARED for kernel in found), found
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Kernels of attention and of blocks, compiled in one process, whose start takes as long as a kernel."""
    return compiled([*ATTENTION, "fp8_tiles.few_specialized_blocks"], tmp_path_factory.mktemp("kernels"))


def of(found: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Returns the kernels with these names; each must be there."""
    kernels = [kernel for kernel in found if kernel["kernel"] in names]
    assert {kernel["kernel"] for kernel in kernels} == set(names), found
    return kernels


@pytest.mark.slow
def test_kernels_of_attention_compile(found: list[dict[str, Any]]) -> None:
    of(found, "_keep_bits_kernel", "_keep_rows_kernel", "_forward_specialized_kernel", "_backward_specialized_kernel")


@pytest.mark.slow
def test_products_of_the_backward_with_specialised_warps_need_not_wait_for_each_other(tmp_path: Path) -> None:
    cases = ("causal", "causal, wide", "window, packed, wide", "causal, dropped", "causal, wide, dropped")
    checks = [f"flash_agreement.attention_of:{case}" for case in cases]
    checks += [f"flash_agreement.in_order:{case}" for case in cases[1:3]]
    found = compiled(checks, tmp_path)
    kernels = [kernel for kernel in found if kernel["kernel"] == "_backward_specialized_kernel"]
    assert len(kernels) == 7 and all(kernel["waits"] < 0.5 for kernel in kernels), kernels
    # Sums, probabilities and scores are in registers. Some positions are on the stack.
    assert all(kernel["stack"] <= 256 for kernel in kernels), kernels


@pytest.mark.slow
def test_products_of_the_forward_with_specialised_warps_need_not_wait_for_each_other(tmp_path: Path) -> None:
    found = compiled(["flash_agreement.specialized_forward"], tmp_path)
    found = [kernel for kernel in found if kernel["kernel"] == "_forward_specialized_kernel"]
    assert len(found) == 5 and all(kernel["waits"] < 0.5 for kernel in found), found
    # Registers hold all scores, weights and sums. With packed documents some positions are on the stack.
    assert [kernel["stack"] for kernel in found[:4]] == 4 * [0] and found[4]["stack"] <= 64, found


@pytest.mark.slow
def test_products_of_blocks_keep_their_sums_in_registers(found: list[dict[str, Any]]) -> None:
    keeps_sums_of_blocks_in_registers(found)


def keeps_sums_of_blocks_in_registers(found: list[dict[str, Any]]) -> None:
    kernels = of(found, "_product_of_blocks_kernel", "_gradient_of_blocks_kernel")
    assert not any(kernel["stack"] for kernel in kernels), kernels


@pytest.mark.slow
def test_products_of_experts_keep_their_sums_in_registers(tmp_path: Path) -> None:
    keeps_sums_of_experts_in_registers(compiled(["expert_kernels.specialized_product_of_many_experts"], tmp_path))


def keeps_sums_of_experts_in_registers(found: list[dict[str, Any]]) -> None:
    kernels = of(found, "_grouped_product_kernel")
    assert all(not kernel["stack"] and kernel["waits"] < 0.5 for kernel in kernels), kernels


@pytest.mark.slow
def test_so_do_those_of_the_other_layouts(tmp_path: Path) -> None:
    every = compiled(["fp8_tiles.small_specialized_blocks", "expert_kernels.specialized_products"], tmp_path)
    assert len(every) == 8
    keeps_sums_of_blocks_in_registers(every)
    keeps_sums_of_experts_in_registers(every)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kernel_compiles(tmp_path: Path) -> None:
    from support import flash_agreement

    checks = [f"{module}.{name}" for module, names in CHECKS.items() for name in names.split()]
    attention = [f"flash_agreement.attention_of:{name}" for name in flash_agreement.CASES]
    found = {kernel["kernel"] for kernel in compiled([*checks, "flash_agreement.bits", *attention], tmp_path)}
    source = "".join(path.read_text() for path in sorted(CORE.rglob("*_triton.py")))
    launched = set(re.findall(r"\b(_\w+_kernel)\[", source))
    assert len(launched) > 30 and launched <= found, launched - found
