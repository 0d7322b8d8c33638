"""Our own flash attention on a GPU: its numbers are those of its definition in float64."""

import pytest
from support import flash_agreement

pytestmark = pytest.mark.gpu


def test_dropout_bits_are_those_of_the_definition() -> None:
    flash_agreement.bits()


@pytest.mark.parametrize("name", flash_agreement.CASES)
def test_outputs_and_gradients_are_those_of_the_definition(name: str) -> None:
    flash_agreement.attention_of(name)


def test_heads_that_are_computed_in_turns_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_agreement.heads_in_turns(monkeypatch)


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_merge_to_whole_rows(packed: bool) -> None:
    flash_agreement.blocks(packed)
