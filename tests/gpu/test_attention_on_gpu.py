"""Our own flash attention and torch's flex_attention on a GPU: their numbers are those of the definition in float64."""

from dataclasses import replace

import pytest
from support import flash_agreement

from megatron.core.ops.attention import flash_triton
from megatron.core.ops.attention.flash_forward_triton import TileSize
from megatron.core.ops.attention.flex import flex_attention_cuda

pytestmark = pytest.mark.gpu


def test_dropout_bits_are_those_of_the_definition() -> None:
    flash_agreement.bits()


@pytest.mark.parametrize("name", flash_agreement.CASES)
def test_outputs_and_gradients_are_those_of_the_definition(name: str) -> None:
    flash_agreement.attention_of(name)


@pytest.mark.parametrize("kind", ["single tokens", "one", "many, some empty", "tail"])
def test_odd_documents(kind: str) -> None:
    flash_agreement.documents(kind)


WITHOUT_DROPOUT = [name for name, case in flash_agreement.CASES.items() if not case.variant.dropout]


@pytest.mark.parametrize("name", [name for name in WITHOUT_DROPOUT if "bias" not in name])
def test_flex_attention_gives_the_numbers_of_the_definition(name: str) -> None:
    flash_agreement.attention_of(name, flex_attention_cuda)


SMALL = TileSize(64, 64, 4, 2)
FORMS = {
    "rows of queries": replace(SMALL, by_query=True),
    "copied tiles, sums begin with what is subtracted": replace(SMALL, bulk_loads=True, folds=True),
    "all, longest first": replace(SMALL, num_stages=3, bulk_loads=True, by_query=True, folds=True, heads_first=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["causal, dropped", "chunks", "packed, dropped", "relative bias, packed"])
def test_forms_of_the_kernels(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tiles in ("_FORWARD_TILES", "_BACKWARD_TILES"):
        monkeypatch.setattr(flash_triton, tiles, {256: FORMS[form]})
        monkeypatch.setattr(flash_triton, tiles + "_WITH_DROPOUT", {})
    flash_agreement.attention_of(name)


def test_heads_that_are_computed_in_turns_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_agreement.heads_in_turns(monkeypatch)


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_merge_to_whole_rows(packed: bool) -> None:
    flash_agreement.blocks(packed)
