"""Which implementations of the layers can be asked for."""

import pytest
from support.command_lines import configured, problems_of


@pytest.mark.parametrize("name", ["auto", "local", "transformer_engine"])
def test_layers_are_ours_whatever_is_asked_for(name: str) -> None:
    config = configured(f"--transformer-impl {name}")
    said = [note for note in config.notes if note.startswith("--transformer-impl transformer_engine: read as auto")]
    assert len(said) == (name == "transformer_engine")
    assert problems_of("--transformer-impl inference_optimized")


def test_generated_kernels_are_retired() -> None:
    assert any(note.startswith("--torch-compile: retired and ignored") for note in configured("--torch-compile").notes)
