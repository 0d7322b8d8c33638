"""cuBLASLt's accumulating fp8 product, with a stand-in for the library that reads descriptors and memory as cuBLASLt
documents them: column-major matrices, transposition, leading dimensions, factors on the device."""

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops.fp8 import cublaslt
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.product import accumulate_product
from megatron.core.ops.fp8.quantize import Quantized

TYPES = {28: torch.float8_e4m3fn, 29: torch.float8_e5m2, 0: torch.float32}


class Library:
    """cuBLASLt on a CPU."""

    def __init__(self, status: int = 0, algorithms: int = 1) -> None:
        self.status, self.algorithms = status, algorithms
        self.objects: dict[Any, dict[Any, Any]] = {}
        self.heuristics = 0

    def _create(self, target: Any, **facts: Any) -> int:
        target._obj.value = len(self.objects) + 1
        self.objects[target._obj.value] = facts
        return 0

    def cublasLtMatmulDescCreate(self, target: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._create(target, transposed={})

    def cublasLtMatrixLayoutCreate(self, target: Any, kind: int, rows: int, columns: int, leading: int) -> int:
        return self._create(target, dtype=TYPES[kind], rows=rows, columns=columns, leading=leading)

    def cublasLtMatmulPreferenceCreate(self, target: Any) -> int:
        return self._create(target)

    def cublasLtMatmulDescSetAttribute(self, of: ctypes.c_void_p, attribute: int, value: Any, size: int) -> int:
        assert size == {3: 4, 17: 8, 18: 8}[attribute]
        self.objects[of.value][attribute] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, of: ctypes.c_void_p, attribute: int, value: Any, size: int) -> int:
        assert size == (8 if attribute == 1 else 4)
        self.objects[of.value][attribute] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, of: ctypes.c_void_p) -> int:
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        *_, preference, count, results, found = arguments
        assert count == 1 and self.objects[preference.value][1] == 32 * 2**20
        assert set(self.objects[preference.value]) == {1, 5, 6, 7, 8}
        self.heuristics += 1
        results._obj.workspace, found._obj.value = 0, self.algorithms
        return 0

    def cublasLtMatmul(self, handle: Any, operation: Any, *arguments: Any) -> int:
        alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, size, _ = arguments
        facts = self.objects[operation.value]
        left, right = (self.matrix(*pair) for pair in ((a, a_layout), (b, b_layout)))
        left = left.t() if facts.get(3) else left
        scales = ctypes.c_float.from_address(facts[17]).value * ctypes.c_float.from_address(facts[18]).value
        addend = self.matrix(c, c_layout)
        result = alpha._obj.value * scales * (left.double() @ right.double()) + beta._obj.value * addend.double()
        assert (workspace, size, len(algorithm._obj)) == (workspace, 32 * 2**20, 8) and workspace % 16 == 0
        out = result.float().t().contiguous()  # column-major
        assert self.objects[d_layout.value]["leading"] == result.shape[0]
        ctypes.memmove(d, out.data_ptr(), out.numel() * 4)
        return self.status

    def matrix(self, address: int, layout: ctypes.c_void_p) -> Tensor:
        """The matrix that a layout describes at an address, [rows, columns]."""
        facts = self.objects[layout.value]
        count = facts["leading"] * facts["columns"]
        memory = bytearray(ctypes.string_at(address, count * facts["dtype"].itemsize))
        values = torch.frombuffer(memory, dtype=facts["dtype"]).to(torch.float32)
        return values.view(facts["columns"], facts["leading"])[:, : facts["rows"]].t()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    found = Library()
    monkeypatch.setattr(cublaslt, "_library", lambda: found)
    cublaslt._plan_of.cache_clear()
    yield found
    cublaslt._plan_of.cache_clear()


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Quantized, Quantized]:
    generator = torch.Generator().manual_seed(1)
    total, left, right = (torch.randn(shape, generator=generator) for shape in ((m, n), (m, k), (n, k)))
    return (
        total,
        Quantized(left.to(dtype), torch.tensor(0.5)),
        Quantized(right.to(torch.float8_e4m3fn), torch.tensor(3.0)),
    )


@pytest.mark.parametrize(("sizes", "name"), itertools.product([(16, 48, 32), (64, 16, 16)], FORMATS))
def test_the_product_is_added(sizes: tuple[int, int, int], name: str, library: Library) -> None:
    total, left, right = operands(*sizes, FORMATS[name].gradients)
    expected = total.clone()
    for factor in (0.5, 4.0):  # other factors, the same plan
        left = Quantized(left.values, torch.tensor(factor))
        accumulate_product(expected, left, right)
        assert cublaslt.accumulate_product(total, left.values, right.values, left.factors, right.factors)
    torch.testing.assert_close(total, expected)
    assert library.heuristics == 1


def test_without_an_algorithm_nothing_changes(library: Library) -> None:
    library.algorithms = 0
    total, left, right = operands(16, 16, 16, torch.float8_e5m2)
    before = total.clone()
    assert not cublaslt.accumulate_product(total, left.values, right.values, left.factors, right.factors)
    assert torch.equal(total, before)


def test_a_failing_call_is_an_error(library: Library) -> None:
    library.status = 7
    total, left, right = operands(16, 16, 16, torch.float8_e5m2)
    with pytest.raises(RuntimeError, match="cublasLtMatmul returned status 7"):
        cublaslt.accumulate_product(total, left.values, right.values, left.factors, right.factors)


def test_alignment() -> None:
    base = torch.empty(1024, dtype=torch.uint8)
    offset = -base.data_ptr() % 512
    assert [cublaslt._alignment(base[offset + at :]) for at in (0, 16, 48, 128)] == [256, 16, 16, 128]


def test_a_build_without_cuda_has_no_library() -> None:
    assert cublaslt.is_available() == (torch.version.cuda is not None)
