"""Which kernels of the layers can be asked for."""

from support.command_lines import configured, problems_of


def test_layers_of_an_inference_server_are_refused() -> None:
    assert problems_of("--transformer-impl inference_optimized")


def test_generated_kernels_are_retired() -> None:
    assert any(note.startswith("--torch-compile: retired and ignored") for note in configured("--torch-compile").notes)
