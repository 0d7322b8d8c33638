"""Our own flash attention against its definition in float64, in Triton's interpreter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import flash_agreement

from megatron.core.attention_plan import plan_attention
from megatron.core.backends import triton_backend
from megatron.core.ops.attention import flash_backward_triton, flash_forward_triton, flash_triton
from megatron.core.ops.attention.flash_forward_triton import TileSize
from megatron.core.ops.attention.kernels import SDPA_CUDA, VARLEN, Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.transformer.enums import AttnBackend

AUTO = AttnBackend.auto
OURS = "our flash attention"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_agreement.use_small_tiles(monkeypatch)


@pytest.mark.slow_cases(
    "causal, wide",
    "window, packed, wide",
    "wide keys, more keys than queries",
    "causal, wide, dropped",
    "packed, dropped",
    "chunks",
)
@pytest.mark.parametrize("name", flash_agreement.CASES)
def test_outputs_and_gradients_are_those_of_the_definition(name: str) -> None:
    flash_agreement.attention_of(name)


@pytest.mark.slow_cases("single tokens", "one")
@pytest.mark.parametrize("kind", ["single tokens", "one", "many, some empty", "tail"])
def test_odd_documents(kind: str) -> None:
    flash_agreement.documents(kind)


def test_dropout_may_have_tiles_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_triton, "_BACKWARD_TILES", {64: TILE, 256: TILE})
    monkeypatch.setattr(flash_triton, "_BACKWARD_TILES_WITH_DROPOUT", {64: replace(TILE, keys=64)})
    heads, bits = torch.zeros(1, 1, 1, 32), torch.zeros(1, dtype=torch.int32)
    assert flash_triton._backward_tile(heads, heads, None) == TILE
    assert flash_triton._backward_tile(heads, heads, bits).keys == 64
    wide = torch.zeros(1, 1, 1, 128)
    assert flash_triton._backward_tile(wide, wide, bits) == TILE


TILE = TileSize(32, 32, 4, 1)
FORMS = {
    "rows of queries": replace(TILE, by_query=True),
    "sums begin with what is subtracted": replace(TILE, folds=True),
    "copied tiles, longest first": replace(TILE, bulk_loads=True, heads_first=True),
    "all": replace(TILE, by_query=True, folds=True, bulk_loads=True, heads_first=True),
}


@pytest.mark.slow_cases("all-causal", "all-causal, dropped")
@pytest.mark.parametrize(
    ("form", "name"),
    [
        # `all` with each case, and each form alone with one of them; the rest is slow.
        pytest.param(form, name, marks=[pytest.mark.slow] * (form != "all" and name != "causal, dropped"))
        for form in FORMS
        for name in ("causal", "causal, dropped", "chunks")
    ],
)
def test_forms_of_the_kernels(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flash_forward_triton, flash_backward_triton):
        monkeypatch.setattr(module, "copies_tiles", lambda device: True)
    for tiles in ("_FORWARD_TILES", "_BACKWARD_TILES"):
        monkeypatch.setattr(flash_triton, tiles, {256: FORMS[form]})
    flash_agreement.attention_of(name)


def test_heads_that_are_computed_in_turns_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_agreement.heads_in_turns(monkeypatch)


class TestChoice:
    """Which layers get the kernel on a GPU. A plan needs no GPU."""

    DROPPED = AttentionVariant(1.0, True, dropout=0.1, widths=(64, 64))

    def kernel(
        self, variant: AttentionVariant, situation: Situation, call: AttentionCall | None = None, queries: int = 8
    ) -> str:
        backend, config = triton_backend(), SimpleNamespace(params_dtype=situation.dtype, attention_backend=AUTO)
        assert backend is not None
        return plan_attention(backend, variant, config).kernel_of(situation, call or AttentionCall(), queries).name

    @pytest.mark.parametrize("packed", [False, True])
    def test_layers_that_drop_cap_or_have_sinks_get_it(self, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
        situation = Situation("cuda", torch.bfloat16, True, packed)
        for change in ({}, {"dropout": 0.0, "cap": 30.0}, {"dropout": 0.0, "sink": True}):
            assert self.kernel(replace(self.DROPPED, **change), situation) == OURS
        assert self.kernel(replace(self.DROPPED, dropout=0.0), situation) != OURS
        assert self.kernel(self.DROPPED, replace(situation, training=False)) != OURS

    def test_packed_documents_prefer_it_from_hopper_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variant, packed = replace(self.DROPPED, dropout=0.0), Situation("cuda", torch.bfloat16, True, True)
        assert self.kernel(variant, packed) == OURS
        assert self.kernel(variant, replace(packed, packed=False)) != OURS
        assert self.kernel(replace(variant, widths=(320, 320)), packed) == "plain torch"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
        assert self.kernel(variant, packed) == VARLEN.name

    def pretend_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
        monkeypatch.setattr(flash_triton, "gluon_kernel", lambda name: flash_triton)

    def test_long_rows_of_plain_layers_get_it_where_it_has_specialised_warps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain, situation = replace(self.DROPPED, dropout=0.0), Situation("cuda", torch.bfloat16, True, False)
        assert self.kernel(plain, situation, queries=4096) == SDPA_CUDA.name
        self.pretend_hopper(monkeypatch)
        assert self.kernel(plain, situation, queries=2048) == OURS
        assert self.kernel(plain, situation, queries=2047) == SDPA_CUDA.name
        assert self.kernel(replace(plain, widths=(128, 128)), situation, queries=4096) == OURS
        masked = AttentionCall(mask=torch.zeros(2, 1, 1, 4096, dtype=torch.bool))
        assert self.kernel(plain, situation, masked, queries=4096) == SDPA_CUDA.name
        for change in ({"causal": False}, {"widths": (96, 96)}, {"widths": (128, 64)}, {"padded": True}):
            assert self.kernel(replace(plain, **change), situation, queries=4096) == SDPA_CUDA.name
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (10, 0))
        assert self.kernel(plain, situation, queries=4096) == SDPA_CUDA.name

    def test_what_computes_short_rows_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pretend_hopper(monkeypatch)
        backend, config = triton_backend(), SimpleNamespace(params_dtype=torch.bfloat16, attention_backend=AUTO)
        assert backend is not None
        for dropout, told in (
            (0.0, f"{OURS} (rows of fewer than 2,048 tokens: {SDPA_CUDA.name})"),
            (0.1, "(--attention-dropout 0 is faster)"),
        ):
            plan = plan_attention(backend, replace(self.DROPPED, dropout=dropout), config)
            assert told in plan.describe("cuda"), dropout

    def test_layers_with_relative_positions_get_it(self) -> None:
        variant = replace(self.DROPPED, adds_bias=True, padded=True)
        assert self.kernel(variant, Situation("cuda", torch.bfloat16, True, False)) == OURS
        assert self.kernel(variant, Situation("cuda", torch.float32, True, False)) == "plain torch"

    def test_wide_heads_other_types_masks_and_deterministic_runs_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        situation = Situation("cuda", torch.bfloat16, True, False)
        assert self.kernel(replace(self.DROPPED, widths=(320, 64)), situation) == "plain torch"
        assert self.kernel(self.DROPPED, replace(situation, dtype=torch.float32)) == "plain torch"
        of_keys, of_pairs = (torch.zeros(2, 1, rows, 8, dtype=torch.bool) for rows in (1, 8))
        assert self.kernel(self.DROPPED, situation, AttentionCall(mask=of_keys)) == OURS
        assert self.kernel(self.DROPPED, situation, AttentionCall(mask=of_pairs)) == "plain torch"
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert self.kernel(self.DROPPED, situation) == "plain torch"
