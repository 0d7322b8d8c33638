"""Our own flash attention against its definition in float64, in Triton's interpreter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import flash_agreement

from megatron.core.attention_plan import plan_attention
from megatron.core.backends import triton_backend
from megatron.core.ops.attention import kernels
from megatron.core.ops.attention.kernels import Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.transformer.enums import AttnBackend

AUTO = AttnBackend.auto
OURS = "our flash attention"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_agreement.use_small_tiles(monkeypatch)


@pytest.mark.parametrize("name", flash_agreement.CASES)
def test_outputs_and_gradients_are_those_of_the_definition(name: str) -> None:
    flash_agreement.attention_of(name)


def test_heads_that_are_computed_in_turns_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_agreement.heads_in_turns(monkeypatch)


class TestChoice:
    """Which layers get the kernel on a GPU. A plan needs no GPU."""

    DROPPED = AttentionVariant(1.0, True, dropout=0.1, widths=(64, 64))

    def kernel(self, variant: AttentionVariant, situation: Situation, call: AttentionCall | None = None) -> str:
        backend, config = triton_backend(), SimpleNamespace(params_dtype=situation.dtype, attention_backend=AUTO)
        assert backend is not None
        return plan_attention(backend, variant, config).kernel_of(situation, call or AttentionCall()).name

    @pytest.mark.parametrize("packed", [False, True])
    def test_layers_that_drop_cap_or_have_sinks_get_it(self, packed: bool) -> None:
        situation = Situation("cuda", torch.bfloat16, True, packed)
        for change in ({}, {"dropout": 0.0, "cap": 30.0}, {"dropout": 0.0, "sink": True}):
            assert self.kernel(replace(self.DROPPED, **change), situation) == OURS
        assert self.kernel(replace(self.DROPPED, dropout=0.0), situation) != OURS
        assert self.kernel(self.DROPPED, replace(situation, training=False)) != OURS

    @pytest.mark.parametrize("takes", [False, True])
    def test_layers_with_relative_positions_get_it_where_allowed(
        self, takes: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernels, "OWN_FLASH_TAKES_BIAS", takes)
        situation = Situation("cuda", torch.bfloat16, True, False)
        variant = replace(self.DROPPED, adds_bias=True, padded=True)
        assert self.kernel(variant, situation) == (OURS if takes else "unfused")

    def test_wide_heads_other_types_masks_and_deterministic_runs_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        situation = Situation("cuda", torch.bfloat16, True, False)
        assert self.kernel(replace(self.DROPPED, widths=(320, 64)), situation) == "unfused"
        assert self.kernel(self.DROPPED, replace(situation, dtype=torch.float32)) == "unfused"
        of_keys, of_pairs = (torch.zeros(2, 1, rows, 8, dtype=torch.bool) for rows in (1, 8))
        assert self.kernel(self.DROPPED, situation, AttentionCall(mask=of_keys)) == OURS
        assert self.kernel(self.DROPPED, situation, AttentionCall(mask=of_pairs)) == "unfused"
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert self.kernel(self.DROPPED, situation) == "unfused"
