"""Compiles our Triton kernels for Hopper GPUs on a machine without one:

    python tests/support/compile_for_hopper.py triton_agreement.masks "flash_agreement.attention_of:causal"

Runs checks of this folder, which call kernels. Each call compiles its kernel to machine code, with the types,
alignments and tiles of the call, and computes nothing: outputs are zeros, and nothing is asserted about them. Prints a
line of JSON for each compiled kernel: its name, its shared memory and its stack, both in bytes, and with specialised
warps also `waits`.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HERE = Path(__file__).parent
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NVDISASM = CUOBJDUMP.with_name("nvdisasm")


class Hopper:
    """What Triton asks the driver of a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_only() -> None:
    """Makes a call of a kernel compile it, once for each specialisation, and print what it needs."""
    driver.set_active(Hopper())
    plain, seen = JITFunction.run, set()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        kernel = plain(self, *args, grid=grid, warmup=True, **settings)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            sizes = {"kernel": self.fn.__name__, "shared": kernel.metadata.shared, "stack": stack(kernel.asm["cubin"])}
            if "warp_specialize" in kernel.asm["ttgir"]:
                sizes["waits"] = waits(kernel.asm["cubin"])
            print(json.dumps(sizes), flush=True)
        return kernel

    JITFunction.run = run


def stack(code: bytes) -> int:
    """Returns the bytes of stack that machine code uses, which is where registers are spilled to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        shown = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(found) for found in re.findall(r"STACK:(\d+)", shown))


def pretend() -> None:
    """Makes code take the paths of a GPU with tensors of the CPU, and new tensors hold zeros."""
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign]
    torch.testing.assert_close = lambda *args, **settings: None

    from support import delta_rule_kernels, flash_agreement, selected_keys

    from megatron.core.ops import sum_rows_triton, symmetric_product_specialized_triton
    from megatron.core.ops.attention import (
        flash_backward_triton,
        flash_forward_specialized_triton,
        flash_forward_triton,
    )
    from megatron.core.ops.fp8 import block_product_specialized_triton, grouped_product_triton
    from megatron.core.ops.moe import grouped_product_specialized_triton

    for checks in (flash_agreement, delta_rule_kernels, selected_keys):
        checks.ON_GPU, checks.DTYPE = True, torch.bfloat16
    for module in (flash_forward_triton, flash_backward_triton):
        module.copies_tiles = lambda device: True
    for module in (
        sum_rows_triton,
        symmetric_product_specialized_triton,
        grouped_product_triton,
        block_product_specialized_triton,
        flash_forward_specialized_triton,
        grouped_product_specialized_triton,
    ):
        module.num_multiprocessors = lambda device: 132


def waits(code: bytes) -> float:
    """Returns the share of matrix products in machine code that are the last of a group to wait for. It is 1 if ptxas
    found no way to let products run on while others begin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        shown = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    products = [line for line in shown.splitlines() if "GMMA" in line]
    return sum("gsb0" in line for line in products) / len(products)


class Unasserted(SourceFileLoader):
    """Loads a module whose assertions are computed and forgotten."""

    def source_to_code(self, data: Any, path: Any, **settings: Any) -> Any:
        tree = ast.parse(data)
        for node in ast.walk(tree):
            for name, block in ast.iter_fields(node):
                if isinstance(block, list):
                    setattr(
                        node, name, [ast.Expr(part.test) if isinstance(part, ast.Assert) else part for part in block]
                    )
        return compile(ast.fix_missing_locations(tree), path, "exec")

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)  # never from a cached file


class Finder:
    """Finds the modules of this folder, for the loader above."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package != "support" or not module:
            return None
        file = str(HERE / f"{module}.py")
        return spec_from_file_location(name, file, loader=Unasserted(name, file))


def main(names: list[str]) -> None:
    """Runs the checks: `module.function`, or `module.function:argument`."""
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    pretend()
    compile_only()
    for name in names:
        place, _, argument = name.partition(":")
        module, function = place.split(".")
        getattr(import_module(f"support.{module}"), function)(*[argument] if argument else [])


if __name__ == "__main__":
    main(sys.argv[1:])
